// crossloom_rpc: serves TVM's RPC protocol over two file descriptors or over TCP.
//
//   crossloom_rpc --workdir DIR --libs DIR READ_FD WRITE_FD
//   crossloom_rpc --workdir DIR --libs DIR --port PORT [--host ADDRESS] [--key KEY]
//
// One program for the host (a crash of a model is then contained), for QEMU, and for boards.  It links libtvm_ffi
// only and opens libtvm_runtime.so and libtvm_runtime_extra.so from --libs, so that building it needs no TVM.
//
// Whoever can connect can run code: over TCP it listens on 127.0.0.1 unless --host says otherwise.  Every connection
// gets a process and a folder of its own; files named by the client stay directly inside that folder.
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

using tvm::ffi::AnyView;
using tvm::ffi::Bytes;
using tvm::ffi::Function;

constexpr int32_t kMagic = 0xff271;  // first word of both sides of TVM's TCP handshake
constexpr int32_t kKeyMismatch = kMagic + 2;
constexpr int32_t kMaxKeyBytes = 4096;
constexpr unsigned kHandshakeSeconds = 30;  // a client that connects and says nothing is dropped
constexpr size_t kAlignmentBytes = 64;  // what TVM's kernels expect
constexpr int64_t kMaxReadBytes = 1 << 18;
constexpr int kUsage = 2;
constexpr int kFailed = 1;

struct Options {
  std::string workdir;
  std::string libs;
  std::string host = "127.0.0.1";
  std::string key;
  int port = -1;
  int read_fd = -1;
  int write_fd = -1;
};

[[noreturn]] void Fail(int code, const std::string& what) {
  std::fprintf(stderr, "crossloom_rpc: %s\n", what.c_str());
  std::exit(code);
}

std::string ErrnoText(const std::string& what) { return what + ": " + std::strerror(errno); }

int ParseInt(const char* text, const char* what) {
  char* end = nullptr;
  errno = 0;
  long value = std::strtol(text, &end, 10);
  if (errno != 0 || end == text || *end != '\0' || value < 0 || value > 1 << 20) {
    Fail(kUsage, std::string(what) + " must be a small non-negative number, not `" + text + "`");
  }
  return static_cast<int>(value);
}

Options Parse(int argc, char** argv) {
  Options opt;
  int positional = 0;
  for (int i = 1; i < argc; ++i) {
    std::string arg = argv[i];
    auto value = [&]() -> const char* {
      if (i + 1 >= argc) Fail(kUsage, arg + " needs a value");
      return argv[++i];
    };
    if (arg == "--workdir") {
      opt.workdir = value();
    } else if (arg == "--libs") {
      opt.libs = value();
    } else if (arg == "--host") {
      opt.host = value();
    } else if (arg == "--key") {
      opt.key = value();
    } else if (arg == "--port") {
      opt.port = ParseInt(value(), "--port");
    } else if (arg.rfind("--", 0) == 0 || positional == 2) {
      Fail(kUsage, "unknown argument `" + arg + "`");
    } else {
      int fd = ParseInt(arg.c_str(), "a file descriptor");
      (positional++ == 0 ? opt.read_fd : opt.write_fd) = fd;
    }
  }
  if (opt.workdir.empty() || opt.libs.empty()) Fail(kUsage, "--workdir and --libs are needed");
  if ((opt.port >= 0) == (positional > 0) || (positional > 0 && positional != 2)) {
    Fail(kUsage, "give either --port or the two file descriptors READ_FD WRITE_FD");
  }
  return opt;
}

void OpenRuntime(const std::string& libs) {
  for (const char* name : {"libtvm_runtime.so", "libtvm_runtime_extra.so"}) {
    std::string path = libs + "/" + name;
    if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) Fail(kFailed, dlerror());
  }
}

bool ReadAll(int fd, void* data, size_t size) {
  char* to = static_cast<char*>(data);
  while (size != 0) {
    ssize_t n = read(fd, to, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    to += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

// The path of a client's file: a plain name, directly inside the work folder.
std::string Confined(const std::string& workdir, const std::string& name) {
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    TVM_FFI_THROW(ValueError) << "file name `" << name << "` must be a plain name";
  }
  return workdir + "/" + name;
}

// A tensor over memory that someone else owns.
tvm::ffi::Tensor Borrow(const DLTensor* from) {
  struct View {
    DLManagedTensor managed;
    std::vector<int64_t> shape;
  };
  auto* view = new View();
  view->shape.assign(from->shape, from->shape + from->ndim);
  view->managed.dl_tensor = *from;
  view->managed.dl_tensor.shape = view->shape.data();
  view->managed.dl_tensor.strides = nullptr;  // RPC tensors are compact
  view->managed.manager_ctx = view;
  view->managed.deleter = [](DLManagedTensor* self) { delete static_cast<View*>(self->manager_ctx); };
  return tvm::ffi::Tensor::FromDLPack(&view->managed);
}

void RegisterWorkFolder(const std::string& workdir) {
  Function::SetGlobal("tvm.rpc.server.workpath",
                      Function::FromTyped([workdir](std::string name) { return Confined(workdir, name); }), true);
  Function::SetGlobal("tvm.rpc.server.load_module", Function::FromTyped([workdir](std::string name) {
                        return tvm::ffi::Module::LoadFromFile(Confined(workdir, name));
                      }),
                      true);
}

// read_tensor(name, offset, dtype, dims...) reads a tensor of the client's machine from a file the client put into the
// work folder: two orders of magnitude faster than RPC's copy through a pipe, most of all under QEMU.
tvm::ffi::Tensor ReadTensor(const std::string& path, int64_t offset, DLDataType dtype, std::vector<int64_t> shape) {
  struct Owned {
    DLManagedTensor managed;
    std::vector<int64_t> shape;
  };
  int64_t bytes = (dtype.bits * dtype.lanes + 7) / 8;
  for (int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(bytes, dim, &bytes)) TVM_FFI_THROW(ValueError) << "bad shape";
  }
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) TVM_FFI_THROW(ValueError) << ErrnoText(path);
  struct stat info {};
  if (offset < 0 || fstat(fd, &info) != 0 || offset > info.st_size || bytes > info.st_size - offset) {
    close(fd);
    TVM_FFI_THROW(ValueError) << path << " is too short";
  }
  size_t rounded = (static_cast<size_t>(bytes) / kAlignmentBytes + 1) * kAlignmentBytes;
  void* data = std::aligned_alloc(kAlignmentBytes, rounded);
  bool ok = data != nullptr && lseek(fd, offset, SEEK_SET) == offset && ReadAll(fd, data, static_cast<size_t>(bytes));
  close(fd);
  if (!ok) {
    std::free(data);
    TVM_FFI_THROW(ValueError) << "cannot read " << bytes << " bytes of " << path;
  }
  auto* owned = new Owned();
  owned->shape = std::move(shape);
  DLTensor& tensor = owned->managed.dl_tensor;
  tensor.data = data;
  tensor.device = DLDevice{kDLCPU, 0};
  tensor.ndim = static_cast<int32_t>(owned->shape.size());
  tensor.dtype = dtype;
  tensor.shape = owned->shape.data();
  tensor.strides = nullptr;
  tensor.byte_offset = 0;
  owned->managed.manager_ctx = owned;
  owned->managed.deleter = [](DLManagedTensor* self) {
    std::free(self->dl_tensor.data);
    delete static_cast<Owned*>(self->manager_ctx);
  };
  return tvm::ffi::Tensor::FromDLPack(&owned->managed);
}

void RegisterReadTensor(const std::string& workdir) {
  Function::SetGlobal("crossloom.rpc.read_tensor",
                      Function::FromPacked([workdir](const AnyView* args, int32_t count, tvm::ffi::Any* ret) {
                        std::vector<int64_t> shape;
                        for (int32_t i = 3; i < count; ++i) shape.push_back(args[i].cast<int64_t>());
                        std::string path = Confined(workdir, args[0].cast<std::string>());
                        DLDataType dtype = tvm::ffi::StringToDLDataType(args[2].cast<std::string>());
                        *ret = ReadTensor(path, args[1].cast<int64_t>(), dtype, std::move(shape));
                      }),
                      true);
}

// bind_views(vm_module, function, saved_name, weights...) saves `function` with its last parameters bound, as TVM's
// save_function does, without copying them: RPC hands tensors over as borrowed DLTensor, which save_function copies,
// once for every entry that shares a weight.  The client keeps the tensors alive until the session ends.
void RegisterBindViews() {
  Function::SetGlobal(
      "crossloom.rpc.bind_views",
      Function::FromPacked([](const AnyView* args, int32_t count, tvm::ffi::Any* ret) {
        auto save = args[0].cast<tvm::ffi::Module>()->GetFunction("save_function");
        if (!save.has_value()) TVM_FFI_THROW(ValueError) << "the module has no save_function";
        std::vector<tvm::ffi::Any> bound = {args[1].cast<tvm::ffi::String>(), args[2].cast<tvm::ffi::String>(), true};
        for (int32_t i = 3; i < count; ++i) {
          bound.push_back(Borrow(args[i].cast<DLTensor*>()));
        }
        std::vector<AnyView> views(bound.begin(), bound.end());
        save.value().CallPacked(views.data(), static_cast<int32_t>(views.size()), ret);
      }),
      true);
}

bool WriteAll(int fd, const void* data, size_t size) {
  const char* from = static_cast<const char*>(data);
  while (size != 0) {
    ssize_t n = write(fd, from, size);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    from += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

// Serve one client until it says goodbye or hangs up; returns the exit code.
int Serve(int read_fd, int write_fd) {
  Function send = Function::FromPacked([write_fd](const AnyView* args, int32_t, tvm::ffi::Any* ret) {
    Bytes data = args[0].cast<Bytes>();
    bool ok = WriteAll(write_fd, data.data(), data.size());
    *ret = ok ? static_cast<int64_t>(data.size()) : int64_t{-1};
  });
  // An empty answer is the end of the stream: the server loop then leaves.
  Function receive = Function::FromPacked([read_fd](const AnyView* args, int32_t, tvm::ffi::Any* ret) {
    // The caller may ask for a whole tensor, of which one read brings a small part: never allocate what was asked.
    int64_t wanted = args[0].cast<int64_t>();
    std::string buffer(static_cast<size_t>(wanted < kMaxReadBytes ? wanted : kMaxReadBytes), '\0');
    ssize_t n;
    do {
      n = read(read_fd, &buffer[0], buffer.size());
    } while (n < 0 && errno == EINTR);
    *ret = Bytes(buffer.data(), n > 0 ? static_cast<size_t>(n) : 0);
  });
  try {
    Function::GetGlobalRequired("rpc.ServerLoop")(send, receive);
  } catch (const std::exception& err) {
    std::fprintf(stderr, "crossloom_rpc: %s\n", err.what());
    return kFailed;
  }
  return 0;
}

void RemoveFolder(const std::string& path) {
  if (DIR* dir = opendir(path.c_str())) {
    while (dirent* entry = readdir(dir)) {
      unlink((path + "/" + entry->d_name).c_str());
    }
    closedir(dir);
  }
  rmdir(path.c_str());
}

// TVM's handshake: magic, key length, "client:KEY [-timeout=SECONDS]"; answers with "server:KEY".
// `limit_s` becomes the session's limit in seconds, 0 for none.
bool Handshake(int fd, const std::string& key, unsigned* limit_s) {
  int32_t magic = 0, size = 0;
  if (!ReadAll(fd, &magic, 4) || magic != kMagic || !ReadAll(fd, &size, 4) || size < 0 || size > kMaxKeyBytes) {
    return false;
  }
  std::string text(static_cast<size_t>(size), '\0');
  if (!ReadAll(fd, &text[0], text.size())) return false;
  std::string name = text.substr(0, text.find(' '));
  if (name != "client:" + key) {
    WriteAll(fd, &kKeyMismatch, 4);
    return false;
  }
  size_t at = text.find("-timeout=");
  *limit_s = at == std::string::npos ? 0 : static_cast<unsigned>(std::strtoul(text.c_str() + at + 9, nullptr, 10)) + 1;
  std::string answer = "server:" + key;
  size = static_cast<int32_t>(answer.size());
  return WriteAll(fd, &kMagic, 4) && WriteAll(fd, &size, 4) && WriteAll(fd, answer.data(), answer.size());
}

int ServeConnection(int fd, const Options& opt) {
  std::string folder = opt.workdir + "/session-XXXXXX";
  if (mkdtemp(&folder[0]) == nullptr) Fail(kFailed, ErrnoText(folder));
  pid_t pid = fork();  // the worker may crash; this process then still clears its folder
  if (pid == 0) {
    unsigned limit_s = 0;
    alarm(kHandshakeSeconds);
    if (!Handshake(fd, opt.key, &limit_s)) std::_Exit(kFailed);
    alarm(limit_s);
    RegisterWorkFolder(folder);
    std::_Exit(Serve(fd, fd));
  }
  close(fd);
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  RemoveFolder(folder);
  return WIFEXITED(status) ? WEXITSTATUS(status) : kFailed;
}

int Listen(const Options& opt) {
  int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (server < 0) Fail(kFailed, ErrnoText("socket"));
  int on = 1;
  setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(opt.port));
  if (inet_pton(AF_INET, opt.host.c_str(), &address.sin_addr) != 1) {
    Fail(kUsage, "--host must be an IPv4 address, not `" + opt.host + "`");
  }
  if (bind(server, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 || listen(server, 4) != 0) {
    Fail(kFailed, ErrnoText(opt.host + ":" + std::to_string(opt.port)));
  }
  socklen_t size = sizeof(address);
  getsockname(server, reinterpret_cast<sockaddr*>(&address), &size);
  std::printf("listening on %s:%d\n", opt.host.c_str(), ntohs(address.sin_port));
  std::fflush(stdout);
  signal(SIGCHLD, SIG_IGN);  // children are not waited for here
  while (true) {
    int fd = accept4(server, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      Fail(kFailed, ErrnoText("accept"));
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    pid_t pid = fork();
    if (pid == 0) {
      close(server);
      signal(SIGCHLD, SIG_DFL);
      std::_Exit(ServeConnection(fd, opt));
    }
    close(fd);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options opt = Parse(argc, argv);
  signal(SIGPIPE, SIG_IGN);
  OpenRuntime(opt.libs);
  RegisterBindViews();
  if (opt.port >= 0) return Listen(opt);
  RegisterWorkFolder(opt.workdir);
  RegisterReadTensor(opt.workdir);  // over TCP the client is elsewhere
  // No destructors: threads of the model may still run.
  std::_Exit(Serve(opt.read_fd, opt.write_fd));
}
