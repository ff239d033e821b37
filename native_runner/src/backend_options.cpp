// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#include "backend_options.h"

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>

#include "failure.h"

namespace farm {

namespace {

using executorch::runtime::BackendOptions;
using executorch::runtime::Error;

constexpr char kBackend[] = "QnnBackend";

template <size_t N>
void apply(const char (&key)[N], const std::optional<int>& value) {
  if (!value) return;
  // One option per call: of several, a refused one leaves it open which of the others hold.
  BackendOptions<1> options;
  Error error = options.set_option(key, *value);
  if (error == Error::Ok) error = executorch::runtime::set_option(kBackend, options.view());
  if (error == Error::Ok) return;
  std::string message = "backend " + std::string(kBackend) + " refuses the option " + key + "=" +
                        std::to_string(*value) + ": " + executorch::runtime::to_string(error);
  if (error == Error::NotFound) message += ": this runner is built without that backend";
  throw Failure(Stage::kOptions, message, static_cast<int64_t>(error));
}

}  // namespace

void apply_backend_options(const Flags& flags) {
  apply("qnn_runtime_log_level", flags.log_level);
  apply("qnn_runtime_htp_performance_mode", flags.htp_performance_mode);
  apply("qnn_runtime_profile_level", flags.profile_level);
}

}  // namespace farm
