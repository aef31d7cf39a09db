// The inner loops for any processor.
#include <cstring>
#include <type_traits>

#define GRADWIRE_LEVEL baseline
#define GRADWIRE_AVX2 0
#include "loops.hpp"

const gradwire::Level& gradwire::baseline_level() { return baseline::LOOPS; }
