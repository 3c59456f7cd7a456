//! `cond` and `while_loop`: which block runs, and how often, is only known when it does.

use super::buffers::{Seen, Sim};
use crate::graph::{Graph, Node, Work};
use crate::ops::Operand;
use crate::tensor::Data;

/// Follows a node with blocks.
pub(super) fn step(sim: &mut Sim, node: &Node, keeps_weights: bool) -> Option<()> {
    match &node.work {
        Work::Cond(blocks) => cond(sim, node, blocks, keeps_weights)?,
        Work::Loop { variables, test, body } => repeat(sim, node, *variables, test, body, keeps_weights)?,
        Work::Op(_) | Work::Rows(..) | Work::Attention(_) => return None,
    }
    node.last_uses.iter().for_each(|id| sim.forget(*id));
    Some(())
}

/// Both blocks, one after the other: the pool keeps what each needs, whichever a run takes. A result may be either's.
fn cond(sim: &mut Sim, node: &Node, blocks: &[Graph; 2], keeps_weights: bool) -> Option<()> {
    let yes = block(sim, &blocks[0], &[], keeps_weights)?;
    let no = block(sim, &blocks[1], &[], keeps_weights)?;
    for (id, (yes, no)) in node.outputs.iter().zip(yes.iter().zip(&no)) {
        let buffer = sim.any_of(vec![yes.buffer, no.buffer]);
        sim.define(*id, Seen { buffer, packed: yes.packed && no.packed });
    }
    yes.into_iter().chain(no).for_each(|seen| sim.drop_user(seen.buffer));
    Some(())
}

/// Shapes of a loop's variables are fixed by its type, so a round takes what the one before took, once each variable is one
/// that the body made or one that it only hands on: after as many rounds as there are variables.
fn repeat(
    sim: &mut Sim,
    node: &Node,
    variables: usize,
    test: &Graph,
    body: &Graph,
    keeps_weights: bool,
) -> Option<()> {
    let mut values = Vec::with_capacity(variables);
    for operand in &node.operands[..variables] {
        let seen = operand_seen(sim, operand, keeps_weights)?;
        sim.add_user(seen.buffer);
        values.push(seen);
    }
    // What comes from outside may be a result after any number of rounds.
    let outside: Vec<usize> = values.iter().map(|seen| seen.buffer).collect();
    outside.iter().for_each(|buffer| sim.add_user(*buffer));
    let mut reached: Vec<Vec<usize>> = outside.iter().map(|buffer| vec![*buffer]).collect();
    let mut packed: Vec<bool> = values.iter().map(|seen| seen.packed).collect();
    for _ in 0..variables + 2 {
        let condition = block(sim, test, &values, keeps_weights)?;
        condition.into_iter().for_each(|seen| sim.drop_user(seen.buffer));
        let after = block(sim, body, &values, keeps_weights)?;
        values.into_iter().for_each(|seen| sim.drop_user(seen.buffer));
        values = after;
        for (i, seen) in values.iter().enumerate() {
            packed[i] &= seen.packed;
            if outside.contains(&seen.buffer) && !reached[i].contains(&seen.buffer) {
                reached[i].push(seen.buffer);
            }
        }
    }
    for (i, id) in node.outputs.iter().enumerate() {
        let mut buffers = std::mem::take(&mut reached[i]);
        if !buffers.contains(&values[i].buffer) {
            buffers.push(values[i].buffer);
        }
        let buffer = sim.any_of(buffers);
        sim.define(*id, Seen { buffer, packed: packed[i] });
    }
    values.into_iter().map(|seen| seen.buffer).chain(outside).for_each(|buffer| sim.drop_user(buffer));
    Some(())
}

/// Follows a block and returns its results, each with a user more; nothing else of it remains.
fn block(sim: &mut Sim, graph: &Graph, inputs: &[Seen], keeps_weights: bool) -> Option<Vec<Seen>> {
    for (id, seen) in graph.inputs.iter().zip(inputs) {
        sim.define(*id, *seen);
    }
    for node in &graph.nodes {
        super::step(sim, graph, node, keeps_weights)?;
    }
    let mut results = Vec::with_capacity(graph.outputs.len());
    for output in &graph.outputs {
        let seen = operand_seen(sim, output, keeps_weights)?;
        sim.add_user(seen.buffer);
        results.push(seen);
    }
    graph.own().for_each(|id| sim.forget(id));
    Some(results)
}

/// What an operand shows; a constant takes nothing, unless it is decompressed for this.
fn operand_seen(sim: &mut Sim, operand: &Operand, keeps_weights: bool) -> Option<Seen> {
    match operand {
        Operand::Value(id) => sim.values.get(id).copied(),
        Operand::Fixed(tensor) => {
            let decompressed = !keeps_weights && matches!(tensor.data, Data::Compressed(_));
            let bytes = if decompressed { tensor.count() * 4 } else { 0 };
            Some(Seen { buffer: sim.allocate(bytes, true), packed: true })
        }
    }
}
