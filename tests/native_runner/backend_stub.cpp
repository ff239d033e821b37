// Preloaded stub of the backend of foreign.pte. The first number of the input selects its behaviour; the output is the
// negated input.
#include <dlfcn.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/platform/log.h>
#include <executorch/runtime/platform/platform.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

using executorch::runtime::ArrayRef;
using executorch::runtime::BackendExecutionContext;
using executorch::runtime::BackendInitContext;
using executorch::runtime::CompileSpec;
using executorch::runtime::DelegateHandle;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::Result;
using executorch::runtime::Span;

enum Order {
  kWork = 0,
  kHang = 1,
  kCrash = 2,
  kAbort = 3,
  kFail = 4,
  kPrint = 5,
  kFailThirdTime = 6,
  kWrongFifthTime = 7,
  kAbortInThread = 8,
  kAbortLate = 9,
};

// True when the file of STUB_SLOW_RENAME is about to be renamed.
std::atomic<bool> is_renaming{false};

[[noreturn]] void give_up() {
  ET_LOG(Fatal, "the stub gives up");
  executorch::runtime::pal_abort();
}

class BackendStub final : public executorch::runtime::BackendInterface {
 public:
  bool is_available() const override { return true; }

  Result<DelegateHandle*> init(BackendInitContext&, FreeableBuffer*, ArrayRef<CompileSpec>) const override {
    return const_cast<BackendStub*>(this);
  }

  Error execute(BackendExecutionContext&, DelegateHandle*, Span<EValue*> args) const override {
    const auto& input = args[0]->toTensor();
    const auto& output = args[args.size() - 1]->toTensor();
    const float* from = input.const_data_ptr<float>();
    static int executions = 0;
    float wrong = 0;
    switch (static_cast<int>(from[0])) {
      case kHang:
        std::fputs("backend stub hangs\n", stderr);
        // TSan handles a signal between two calls at the end of the next call; pause() would not return.
        for (;;) ::usleep(20'000);
      case kCrash:
        std::raise(SIGSEGV);
        break;
      case kAbort:
        give_up();
      case kAbortInThread:
        std::thread(&give_up).detach();
        for (;;) ::pause();
      case kAbortLate:
        std::thread([] {
          while (!is_renaming) ::usleep(1000);
          give_up();
        }).detach();
        break;
      case kFail:
        ET_LOG(Error, "the stub refuses");
        return Error::DelegateInvalidHandle;
      case kPrint:
        std::puts("{\"schema\":1,\"job\":0,\"ok\":true}");
        break;
      case kFailThirdTime:
        if (++executions == 3) return Error::DelegateInvalidHandle;
        break;
      case kWrongFifthTime:
        // Every fifth inference.
        if (++executions % 5 == 0) wrong = 1;
        break;
      default:
        break;
    }
    float* to = output.mutable_data_ptr<float>();
    for (ssize_t i = 0; i < output.numel(); ++i) to[i] = -from[i] + wrong;
    return Error::Ok;
  }
};

BackendStub stub;
const Error registered = executorch::runtime::register_backend({"BackendWithCompilerDemo", &stub});

}  // namespace

// Slow disk: the thread of kAbortLate aborts meanwhile.
extern "C" int rename(const char* from, const char* to) noexcept {
  static const auto real = reinterpret_cast<int (*)(const char*, const char*)>(dlsym(RTLD_NEXT, "rename"));
  const char* slow = std::getenv("STUB_SLOW_RENAME");
  if (slow != nullptr && std::strcmp(slow, to) == 0) {
    is_renaming = true;
    ::usleep(300'000);
  }
  return real(from, to);
}

extern "C" int chdir(const char* path) noexcept {
  static const auto real = reinterpret_cast<int (*)(const char*)>(dlsym(RTLD_NEXT, "chdir"));
  if (std::getenv("STUB_SLOW_CHDIR") != nullptr) ::usleep(300'000);
  return real(path);
}

namespace {
// True in the main thread after it has woken up the watchdog, if STUB_PREEMPTED is set.
thread_local bool is_preempted = false;
}  // namespace

extern "C" ssize_t write(int descriptor, const void* bytes, size_t size) {
  static const auto real = reinterpret_cast<ssize_t (*)(int, const void*, size_t)>(dlsym(RTLD_NEXT, "write"));
  if (size == sizeof(uint64_t) && std::getenv("STUB_PREEMPTED") != nullptr) is_preempted = true;
  return real(descriptor, bytes, size);
}

// Delays a thread before it takes the next lock, as if it had no processor.
extern "C" int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  static const auto real = reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  if (is_preempted) {
    is_preempted = false;
    ::usleep(300'000);
  }
  return real(mutex);
}
