// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include "flags.h"
#include "report.h"
#include "run.h"

namespace farm {

// Runs a program that generates text, as `run` does: writes the logits of scored sequences, then the generated tokens.
void generate(const Flags& flags, const Backend& backend, SharedReport* report);

}  // namespace farm
