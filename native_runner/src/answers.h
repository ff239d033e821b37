// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.
#pragma once

#include <string>

namespace farm {

// The standard output of a session, which nothing but answers may go to: backends print to file descriptor
// 1, so the real one is moved away and 1 becomes standard error.
class Answers {
 public:
  // Ends the process with kExitUnheard when there is no standard output.
  Answers();

  int descriptor() const { return descriptor_; }

  // Writes a whole line, which ends with \n. Ends the process with kExitUnheard when nobody can read it.
  void write(const std::string& line) const;

 private:
  int descriptor_;
};

}  // namespace farm
