// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include "flags.h"
#include "report.h"
#include "run.h"

namespace farm {

// As `run`, of a program that generates text: writes the logits of sequences that it is told, then what it says itself.
void generate(const Flags& flags, const Backend& backend, SharedReport* report);

}  // namespace farm
