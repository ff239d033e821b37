// Stub of dlopen without RTLD_DEEPBIND, which the bridge uses: the runtime of a sanitizer ends a process that uses it.
#include <dlfcn.h>

extern "C" void* dlopen(const char* name, int flags) {
  using Open = void* (*)(const char*, int);
  return reinterpret_cast<Open>(dlsym(RTLD_NEXT, "dlopen"))(name, flags & ~RTLD_DEEPBIND);
}
