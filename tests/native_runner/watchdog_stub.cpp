// Preloaded stub of a machine without resources for the function that STUB_FAILS names.
#include <pthread.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace {
bool fails(const char* what) {
  const char* failing = std::getenv("STUB_FAILS");
  return failing != nullptr && std::strcmp(failing, what) == 0;
}
}  // namespace

extern "C" {

int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) noexcept { return EAGAIN; }

int eventfd(unsigned int, int) noexcept {
  if (!fails("eventfd")) return 0;
  errno = EMFILE;
  return -1;
}
}
