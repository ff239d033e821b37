// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>

namespace farm {

// Standard output of a session, for answers only. Backends print to file descriptor 1, so the original descriptor is
// duplicated and 1 becomes standard error.
class Answers {
 public:
  // Ends the process with kExitNoReader if there is no standard output.
  Answers();

  int descriptor() const { return descriptor_; }

  // Writes a whole line, which ends with \n. Ends the process with kExitNoReader if the reader is gone.
  void write(const std::string& line) const;

 private:
  int descriptor_;
};

}  // namespace farm
