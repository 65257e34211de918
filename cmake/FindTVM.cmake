# tvm-ffi's headers and library come from its wheel; Python tells where.
find_package(Python3 COMPONENTS Interpreter REQUIRED)
execute_process(COMMAND "${Python3_EXECUTABLE}" -m tvm_ffi.config --cmakedir
                OUTPUT_VARIABLE tvm_ffi_cmakedir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE rc)
if(NOT rc EQUAL 0)
  message(FATAL_ERROR "apache-tvm-ffi is not installed for ${Python3_EXECUTABLE}: pip install apache-tvm-ffi")
endif()
set(tvm_ffi_DIR "${tvm_ffi_cmakedir}")
find_package(tvm_ffi CONFIG REQUIRED)
