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

[[noreturn]] void end_without_reader() {
  std::fprintf(stderr, "farm_runner: standard output of the session is gone: %s\n", std::strerror(errno));
  _exit(kExitNoReader);
}

}  // namespace

Answers::Answers() : descriptor_(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1)) {
  if (descriptor_ < 0) end_without_reader();
  if (::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
    // There is no standard error either: output of backends is dropped.
    const int nowhere = ::open("/dev/null", O_WRONLY);
    if (nowhere < 0 || ::dup2(nowhere, STDOUT_FILENO) < 0) end_without_reader();
    if (nowhere != STDOUT_FILENO) ::close(nowhere);
  }
  // Output of a backend must stay between the first and the last line of its job.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  // Line buffering: backends print a line in pieces, each of which would be a packet to the host. No larger buffer: the
  // last line before a crash must not be lost.
  std::setvbuf(stderr, nullptr, _IOLBF, 0);
}

void Answers::write(const std::string& line) const {
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t put = ::write(descriptor_, line.data() + done, line.size() - done);
    if (put >= 0) {
      done += static_cast<size_t>(put);
    } else if (errno == EAGAIN) {
      // Another process made the shared pipe non-blocking.
      pollfd reader{descriptor_, POLLOUT, 0};
      ::poll(&reader, 1, -1);
    } else if (errno != EINTR) {
      end_without_reader();
    }
  }
}

}  // namespace farm
