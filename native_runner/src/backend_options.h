// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include "flags.h"

namespace farm {

// Hands the runtime options that were passed to the QNN backend. They are global to the process and are
// read when the first model loads. Throws Failure at options.
void apply_backend_options(const Flags& flags);

}  // namespace farm
