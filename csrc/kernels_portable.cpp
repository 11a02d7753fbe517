#include "kernels.inl"

namespace paceline {
const Kernels* portable_kernels() { return &kKernels; }
}  // namespace paceline
