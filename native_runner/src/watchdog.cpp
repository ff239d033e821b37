// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "failure.h"
#include "job.h"

namespace farm {

namespace {

// Ends the process by SIGALRM if its orderly end hangs: the thread that hangs may hold a lock, or no process may read
// the answer.
constexpr unsigned kLastResortSeconds = 10;

// State for the signal handler.
std::atomic<int> signal_wake{-1};
std::atomic<int> signal_number{0};
static_assert(std::atomic<int>::is_always_lock_free, "a handler of a signal must not wait");

void wake_up(int descriptor) {
  const uint64_t one = 1;
  while (::write(descriptor, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

// A handler instead of a blocked signal: threads that a library started before main do not block it.
void on_signal(int number) {
  const int before = errno;
  signal_number = number;
  wake_up(signal_wake);
  errno = before;
}

const char* signal_name(int number) {
  return number == SIGTERM ? "SIGTERM" : number == SIGINT ? "SIGINT" : "SIGHUP";
}

[[noreturn]] void refuse(const char* what, int error) {
  throw Failure(Stage::kFlags,
                std::string("cannot start what watches the run: ") + what + ": " + std::strerror(error));
}

int wait_ms(const std::optional<Watchdog::Clock::time_point>& until) {
  if (!until) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*until - Watchdog::Clock::now()).count();
  return left <= 0 ? 0 : left > INT_MAX ? INT_MAX : static_cast<int>(left);
}

}  // namespace

Watchdog* Watchdog::start(int answers) { return launch(std::unique_ptr<Watchdog>(new Watchdog(answers))); }

Watchdog* Watchdog::start_for_signals() {
  Watchdog* watchdog = launch(std::unique_ptr<Watchdog>(new Watchdog(-1)));
  signal_wake = watchdog->wake_;
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) {
    struct sigaction action {};
    if (::sigaction(number, nullptr, &action) != 0 || action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = &on_signal;
    action.sa_flags = SA_RESTART;
    ::sigaction(number, &action, nullptr);
  }
  return watchdog;
}

Watchdog* Watchdog::launch(std::unique_ptr<Watchdog> watchdog) {
  // The parent process may have ignored SIGALRM.
  std::signal(SIGALRM, SIG_DFL);
  try {
    std::thread([started = watchdog.get()] { started->run(); }).detach();
  } catch (const std::system_error& error) {
    refuse("a thread", error.code().value());
  }
  return watchdog.release();
}

Watchdog::Watchdog(int answers)
    : answers_(answers), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), watches_reader_(answers >= 0) {
  if (wake_ < 0) refuse("eventfd", errno);
}

void Watchdog::arm(Clock::time_point deadline, std::function<void()> expire) {
  const std::lock_guard<std::mutex> lock(mutex_);
  deadline_ = deadline;
  expire_ = std::move(expire);
  armed_ = true;
  // Mostly without a wake-up: the watchdog wakes up at the old deadline, which is earlier, and finds the new one.
  if (!sleeps_until_ || *sleeps_until_ > deadline) wake_up(wake_);
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
    // poll reports errors and a closed reader without a requested event.
    pollfd watched[2] = {{wake_, POLLIN, 0}, {answers_, 0, 0}};
    const std::optional<Clock::time_point> until = next_wake();
    if (::poll(watched, answers_ < 0 ? 1 : 2, wait_ms(until)) < 0 && errno != EINTR) {
      std::perror("farm_runner: the watchdog cannot wait");
      _exit(kExitNoReader);
    }
    if (watched[0].revents != 0) {
      uint64_t count = 0;
      while (::read(wake_, &count, sizeof(count)) < 0 && errno == EINTR) {
      }
    }
    look_at_reader(watched[1].revents);
    end_on_signal();
    expire_if_due();
  }
}

void Watchdog::end_on_signal() {
  const int number = signal_number;
  if (number == 0) return;
  ::alarm(kLastResortSeconds);
  end_current_job(std::string("ended by ") + signal_name(number), kExitSignalled);
  // No job was running.
  std::signal(number, SIG_DFL);
  ::raise(number);
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
  // The session has ended, and poll would report this again and again.
  while (!watched) ::pause();
  ::alarm(kLastResortSeconds);
  std::fputs("farm_runner: standard output of the session is gone\n", stderr);
  _exit(kExitNoReader);
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
