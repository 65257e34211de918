# Defines crossloom::tvm_ffi: tvm-ffi's headers and shared library.
#
# Both come from the installed wheel; Python tells where.  When cross compiling the headers still do, and the library
# of the other machine is named by CROSSLOOM_LIBS, a folder with libtvm_ffi.so
# (`python -m crossloom.runtime.board_libs aarch64` prints one).
find_package(Python3 COMPONENTS Interpreter REQUIRED)
execute_process(COMMAND "${Python3_EXECUTABLE}" -m tvm_ffi.config --cmakedir
                OUTPUT_VARIABLE tvm_ffi_cmakedir OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE rc)
if(NOT rc EQUAL 0)
  message(FATAL_ERROR "apache-tvm-ffi is not installed for ${Python3_EXECUTABLE}: pip install apache-tvm-ffi")
endif()
set(tvm_ffi_DIR "${tvm_ffi_cmakedir}")

add_library(crossloom_tvm_ffi INTERFACE)
add_library(crossloom::tvm_ffi ALIAS crossloom_tvm_ffi)
if(CMAKE_CROSSCOMPILING)
  set(CROSSLOOM_LIBS "" CACHE PATH "Folder with libtvm_ffi.so of the machine compiled for")
  if(NOT EXISTS "${CROSSLOOM_LIBS}/libtvm_ffi.so")
    message(FATAL_ERROR "cross compiling needs -DCROSSLOOM_LIBS=<folder with libtvm_ffi.so for "
                        "${CMAKE_SYSTEM_PROCESSOR}>: python -m crossloom.runtime.board_libs prints one")
  endif()
  execute_process(COMMAND "${Python3_EXECUTABLE}" -m tvm_ffi.config --includedir
                  OUTPUT_VARIABLE tvm_ffi_include OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE rc)
  execute_process(COMMAND "${Python3_EXECUTABLE}" -m tvm_ffi.config --dlpack-includedir
                  OUTPUT_VARIABLE dlpack_include OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT rc EQUAL 0)
    message(FATAL_ERROR "${Python3_EXECUTABLE} -m tvm_ffi.config --includedir failed")
  endif()
  target_include_directories(crossloom_tvm_ffi SYSTEM INTERFACE "${tvm_ffi_include}" "${dlpack_include}")
  target_link_libraries(crossloom_tvm_ffi INTERFACE "${CROSSLOOM_LIBS}/libtvm_ffi.so")
else()
  set(Python_EXECUTABLE "${Python3_EXECUTABLE}")  # tvm_ffi's own search must find the same one
  find_package(tvm_ffi CONFIG REQUIRED)
  target_link_libraries(crossloom_tvm_ffi INTERFACE tvm_ffi::header tvm_ffi::shared)
endif()
