// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "answers.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "failure.h"

namespace farm {

namespace {

[[noreturn]] void unheard() {
  std::fprintf(stderr, "farm_runner: standard output of the session is gone: %s\n", std::strerror(errno));
  _exit(kExitUnheard);
}

}  // namespace

Answers::Answers() : descriptor_(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1)) {
  if (descriptor_ < 0) unheard();
  if (::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
    // No standard error either: what backends print goes nowhere.
    const int nowhere = ::open("/dev/null", O_WRONLY);
    if (nowhere < 0 || ::dup2(nowhere, STDOUT_FILENO) < 0) unheard();
    if (nowhere != STDOUT_FILENO) ::close(nowhere);
  }
  // What a backend prints belongs between the lines that say where its job begins and ends.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  // Backends print a line in pieces, and on the way to a host each would be a packet. Not more than a line: the
  // last one before a crash must not be lost.
  std::setvbuf(stderr, nullptr, _IOLBF, 0);
}

void Answers::write(const std::string& line) const {
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t put = ::write(descriptor_, line.data() + done, line.size() - done);
    if (put >= 0) {
      done += static_cast<size_t>(put);
    } else if (errno == EAGAIN) {
      // Somebody made the pipe non-blocking, for all who share it.
      pollfd reader{descriptor_, POLLOUT, 0};
      ::poll(&reader, 1, -1);
    } else if (errno != EINTR) {
      unheard();
    }
  }
}

}  // namespace farm
