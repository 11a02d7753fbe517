#include "kernels.inl"

namespace paceline {
const Kernels* amx_kernels() { return &kKernels; }
}  // namespace paceline
