"""Writes `../ops/*.mil`: for each operation of MIL that the executor runs, programs, inputs and expected values.

Run by hand:  python write.py   (coremltools 9.0, numpy)
"""

import elementwise
import harness
import indexed
import moves
import norms
import products
import shapes
import states
import weights

if __name__ == "__main__":
    for group in (
        elementwise.elementwise,
        elementwise.functions,
        elementwise.casts,
        elementwise.reductions,
        moves.moves,
        moves.padding,
        moves.orders,
        indexed.indexed,
        indexed.updates,
        norms.norms,
        products.products,
        shapes.shapes,
        weights.weights,
        states.states,
    ):
        group()
    harness.write()
