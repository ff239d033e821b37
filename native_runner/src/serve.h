// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include "flags.h"

namespace farm {

// Takes jobs from standard input until it ends, and answers each on standard output: the session mode of
// docs/reference/native_runner.md. Returns the exit code. Throws Failure at options before the first job, for runtime
// options that the backend does not take.
int serve(const Flags& flags);

}  // namespace farm
