// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <system_error>
#include <thread>
#include <utility>

#include "failure.h"

namespace farm {

namespace {

// Ends the process by SIGALRM if its orderly end hangs: the thread that is stuck may hold a lock, or
// nobody may read the answer.
constexpr unsigned kLastResortSeconds = 10;

int wait_ms(const std::optional<Watchdog::Clock::time_point>& until) {
  if (!until) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*until - Watchdog::Clock::now()).count();
  return left <= 0 ? 0 : left > INT_MAX ? INT_MAX : static_cast<int>(left);
}

}  // namespace

Watchdog* Watchdog::start(int answers) {
  // Its parent may have left it ignored.
  std::signal(SIGALRM, SIG_DFL);
  auto* watchdog = new Watchdog(answers);
  std::thread([watchdog] { watchdog->run(); }).detach();
  return watchdog;
}

Watchdog::Watchdog(int answers)
    : answers_(answers), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), watches_reader_(answers >= 0) {
  if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

void Watchdog::arm(Clock::time_point deadline, std::function<void()> expire) {
  const std::lock_guard<std::mutex> lock(mutex_);
  deadline_ = deadline;
  expire_ = std::move(expire);
  armed_ = true;
  // Job after job the old deadline comes first: it wakes up for that one and finds the new one.
  if (sleeps_until_ && *sleeps_until_ <= deadline) return;
  const uint64_t one = 1;
  while (::write(wake_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void Watchdog::disarm() {
  const std::lock_guard<std::mutex> lock(mutex_);
  armed_ = false;
}

void Watchdog::stop_watching_reader() {
  const std::lock_guard<std::mutex> lock(mutex_);
  watches_reader_ = false;
}

void Watchdog::run() {
  for (;;) {
    // Errors and the hang-up of the other end are reported without being asked for.
    pollfd watched[2] = {{wake_, POLLIN, 0}, {answers_, 0, 0}};
    const std::optional<Clock::time_point> until = next_wake();
    if (::poll(watched, answers_ < 0 ? 1 : 2, wait_ms(until)) < 0 && errno != EINTR) {
      std::perror("farm_runner: the watchdog cannot wait");
      _exit(kExitUnheard);
    }
    if (watched[0].revents != 0) {
      uint64_t count = 0;
      while (::read(wake_, &count, sizeof(count)) < 0 && errno == EINTR) {
      }
    }
    look_at_reader(watched[1].revents);
    expire_if_due();
  }
}

std::optional<Watchdog::Clock::time_point> Watchdog::next_wake() {
  const std::lock_guard<std::mutex> lock(mutex_);
  sleeps_until_ = armed_ ? std::optional(deadline_) : std::nullopt;
  return sleeps_until_;
}

void Watchdog::look_at_reader(short events) {
  if ((events & (POLLERR | POLLHUP | POLLNVAL)) == 0) return;
  bool watched = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    watched = watches_reader_;
  }
  // The session is over, and this would be reported again and again.
  while (!watched) ::pause();
  ::alarm(kLastResortSeconds);
  std::fputs("farm_runner: standard output of the session is gone\n", stderr);
  _exit(kExitUnheard);
}

void Watchdog::expire_if_due() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!armed_ || Clock::now() < deadline_) return;
  armed_ = false;
  ::alarm(kLastResortSeconds);
  expire_();
  ::alarm(0);
}

}  // namespace farm
