#pragma once

#include <string>

#include "core/error.hpp"

/// Throws Error(kInvalidUsage) unless `condition` holds.
#define KVXFER_REQUIRE(condition, message)                                  \
  do {                                                                      \
    if (!(condition)) {                                                     \
      throw ::kvxfer::Error(::kvxfer::ErrorKind::kInvalidUsage, (message)); \
    }                                                                       \
  } while (false)
