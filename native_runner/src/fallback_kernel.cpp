// Copyright (c) the farm authors. BSD-3-Clause, see LICENSE.

// llama::fallback separates the parts of a decoder that is split into several QNN contexts, so that no delegate takes
// two parts. The kernel returns its input; ExecuTorch has no kernel for this operator.
#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>

#include <cstring>

namespace farm {

namespace {

using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;

Tensor& fallback_out(KernelRuntimeContext& context, const Tensor& input, Tensor& output) {
  if (executorch::runtime::resize_tensor(output, input.sizes()) != Error::Ok || input.nbytes() != output.nbytes()) {
    context.fail(Error::InvalidArgument);
    return output;
  }
  if (input.nbytes() > 0) std::memmove(output.mutable_data_ptr(), input.const_data_ptr(), input.nbytes());
  return output;
}

}  // namespace

EXECUTORCH_LIBRARY(llama, "fallback.out", fallback_out);

}  // namespace farm
