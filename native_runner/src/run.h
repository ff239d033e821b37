// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include "flags.h"
#include "report.h"

namespace farm {

// Loads, executes and writes as `flags` say, filling in `report` on the way. Throws Failure.
void run(const Flags& flags, Report* report);

}  // namespace farm
