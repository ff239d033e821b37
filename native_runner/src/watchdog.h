// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

namespace farm {

// Thread that acts while the main thread hangs in a backend: it ends a run after its time limit, a single run after a
// signal, and the process when the reader of its answers is gone. Not destroyed: it runs until the process ends.
class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;

  // Starts the watchdog of a session: `answers` is the descriptor whose reader is watched. Throws Failure at flags
  // without resources.
  static Watchdog* start(int answers);

  // Starts the watchdog of a single run: SIGTERM, SIGINT and SIGHUP, unless they were ignored, end the current job with
  // a result, or the process without a job. Throws Failure at flags without resources.
  static Watchdog* start_for_signals();

  // Calls `expire` in the watchdog's thread at `deadline`, unless `disarm` was called before. `expire` ends the
  // process, or returns if the run ended by itself at that moment.
  void arm(Clock::time_point deadline, std::function<void()> expire);
  void disarm();

  // Ends the watch of the reader.
  void stop_watching_reader();

 private:
  explicit Watchdog(int answers);
  static Watchdog* launch(std::unique_ptr<Watchdog> watchdog);
  void run();
  void end_on_signal();
  void look_at_reader(short events);
  void expire_if_due();
  std::optional<Clock::time_point> next_wake();

  const int answers_;
  int wake_ = -1;
  std::mutex mutex_;
  bool watches_reader_;
  bool armed_ = false;
  Clock::time_point deadline_;
  std::optional<Clock::time_point> sleeps_until_;
  std::function<void()> expire_;
};

}  // namespace farm
