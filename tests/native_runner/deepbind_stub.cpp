// A stub: stands in front of dlopen where the runner was built with a sanitizer, whose runtime ends the process that
// asks for RTLD_DEEPBIND, as the bridge does.
#include <dlfcn.h>

extern "C" void* dlopen(const char* name, int flags) {
  using Open = void* (*)(const char*, int);
  return reinterpret_cast<Open>(dlsym(RTLD_NEXT, "dlopen"))(name, flags & ~RTLD_DEEPBIND);
}
