// Stands in for torch's own <ATen/ATen.h>, which declares every operator: a quarter of the compiler's time. c10d's
// headers include it, and need no more of it than this.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
