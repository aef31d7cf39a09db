// All inner loops of one instruction set; the including file sets GRADWIRE_LEVEL, GRADWIRE_AVX2 and the target.
#include "level.hpp"
#include "vectors.hpp"

#include "casting_loops.hpp"
#include "finite_loops.hpp"
#include "low_rank_loops.hpp"
#include "low_rank_panel_loops.hpp"
#include "bases_loops.hpp"
#include "selection_loops.hpp"
#include "signs_loops.hpp"
#include "codes_loops.hpp"
#include "quantization_loops.hpp"
#include "rotation_loops.hpp"

#define GRADWIRE_TEXT_OF(name) #name
#define GRADWIRE_TEXT(name) GRADWIRE_TEXT_OF(name)

namespace gradwire::GRADWIRE_LEVEL {

constexpr Level LOOPS{
    GRADWIRE_TEXT(GRADWIRE_LEVEL),
    cast,
    finite,
    pack,
    unpack,
    quantize,
    dequantize,
    rotate,
    sample,
    scan,
    take,
    scatter,
    left,
    right,
    finish,
    orthogonalize,
    normalize,
};

}  // namespace gradwire::GRADWIRE_LEVEL
