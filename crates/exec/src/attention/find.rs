//! Attention in a graph: which nodes are one.

use std::collections::{HashMap, HashSet};

use kvbaton_kernels::rows::Binary;
use kvbaton_mil::program::ValueId;

use super::masks::Masks;
use super::{Attention, ComputedMask};
use crate::graph::{Graph, Node, Work};
use crate::ops::{Matmul, Op, Operand};
use crate::tensor::count;
use crate::tile::{self, RowProgram, Step};

/// Replaces every attention of the graph by one node.
pub(crate) fn fuse(graph: &mut Graph) {
    let mut masks = Masks::default();
    while let Some((nodes, node)) = find(graph, &mut masks) {
        let last = nodes.iter().copied().max().expect("attention has nodes");
        graph.nodes[last] = node;
        let mut i = 0;
        graph.nodes.retain(|_| {
            i += 1;
            i - 1 == last || !nodes.contains(&(i - 1))
        });
    }
}

/// The first attention of the graph: which nodes it takes the place of, and the node.
fn find(graph: &Graph, masks: &mut Masks) -> Option<(Vec<usize>, Node)> {
    let producer = graph.producers();
    let mut readers: HashMap<ValueId, Vec<usize>> = HashMap::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        for id in node.reads() {
            readers.entry(id).or_default().push(i);
        }
    }
    let kept: HashSet<ValueId> = graph.kept().collect();
    // The one node that reads a value, if it is one and the value is no output.
    let only_reader = |id: ValueId| match readers.get(&id).map(Vec::as_slice) {
        Some([reader]) if !kept.contains(&id) => Some(*reader),
        _ => None,
    };
    (0..graph.nodes.len()).find_map(|i| candidate(graph, &producer, &only_reader, i, masks))
}

fn matmul(node: &Node) -> Option<&Matmul> {
    match &node.work {
        Work::Op(op) => op.as_matmul(),
        _ => None,
    }
}

/// Whether a node only shows its operand's rows under another shape.
fn keeps_rows(graph: &Graph, node: &Node) -> bool {
    match (&node.work, graph.operand_shapes(&node.operands)) {
        (Work::Op(op), Some(shapes)) => op.keeps_rows(&shapes),
        _ => false,
    }
}

fn candidate(
    graph: &Graph,
    producer: &HashMap<ValueId, usize>,
    only_reader: &impl Fn(ValueId) -> Option<usize>,
    middle: usize,
    masks: &mut Masks,
) -> Option<(Vec<usize>, Node)> {
    let node = &graph.nodes[middle];
    let mut nodes = vec![middle];
    let program = match &node.work {
        Work::Rows(program, _) => program.clone(),
        // A softmax alone is a row program of one line.
        Work::Op(op) if node.kind == "softmax" => alone(graph, node, op.as_ref())?,
        _ => return None,
    };
    let softmax_like = |l: &tile::Line| matches!(l.step, Step::Softmax { .. } | Step::Reduce { .. });
    if !program.lines.iter().any(softmax_like) || node.outputs.len() != 1 || program.results.len() != 1 {
        return None;
    }
    // Forward, past changes of shape, to the second product.
    let mut probabilities = node.outputs[0];
    let second = loop {
        let next = only_reader(probabilities)?;
        nodes.push(next);
        if matmul(&graph.nodes[next]).is_some() {
            break next;
        }
        if !keeps_rows(graph, &graph.nodes[next]) {
            return None;
        }
        probabilities = graph.nodes[next].outputs[0];
    };
    let second_node = &graph.nodes[second];
    let second_matmul = matmul(second_node)?.clone();
    if second_matmul.transpose_x || !is_value(&second_node.operands[0], probabilities) {
        return None;
    }
    // Backward from each operand that only this node reads to the first product.
    let (index, first, between) = (0..node.operands.len()).find_map(|index| {
        let Operand::Value(mut id) = node.operands[index] else { return None };
        let mut between = Vec::new();
        let mut reader = middle;
        loop {
            if only_reader(id)? != reader {
                return None;
            }
            let source = *producer.get(&id)?;
            between.push(source);
            if matmul(&graph.nodes[source]).is_some() {
                return Some((index, source, between));
            }
            if !keeps_rows(graph, &graph.nodes[source]) {
                return None;
            }
            reader = source;
            id = graph.nodes[source].reads().next()?;
        }
    })?;
    nodes.extend(between);
    let first_node = &graph.nodes[first];
    let first_matmul = matmul(first_node)?.clone();
    let constant = |o: &Operand| matches!(o, Operand::Fixed(_));
    if first_node.operands.iter().any(constant) || second_node.operands.iter().any(constant) {
        return None;
    }
    let shape = |id: ValueId| graph.known_shape(id).map(<[usize]>::to_vec);
    let (scores_shape, p_shape) = (shape(first_node.outputs[0])?, shape(probabilities)?);
    let out_shape = shape(second_node.outputs[0])?;
    let len = *scores_shape.last()?;
    let ranks = scores_shape.len() >= 2 && p_shape.len() >= 2 && out_shape.len() == p_shape.len();
    // The second product must not repeat the probabilities, and blocks must lie in one batch of either.
    if !ranks
        || p_shape.last() != Some(&len)
        || p_shape[..p_shape.len() - 1] != out_shape[..out_shape.len() - 1]
    {
        return None;
    }
    let (m, m2) = (scores_shape[scores_shape.len() - 2], p_shape[p_shape.len() - 2]);
    if m.min(m2) == 0 || !m.max(m2).is_multiple_of(m.min(m2)) || count(&scores_shape) != program.rows * len {
        return None;
    }
    let (rows, scores) = take_scores(program, index, len)?;
    let probabilities = rows.results[0];
    let dtype = second_matmul.dtype();
    // Right factors that a concat joins for this product alone.
    let joined = |node: &Node, rows_at: usize| {
        let Operand::Value(id) = node.operands[1] else { return None };
        only_reader(id)?;
        let at = *producer.get(&id)?;
        let source = &graph.nodes[at];
        let axis = match &source.work {
            Work::Op(op) => op.joins(&graph.operand_shapes(&source.operands)?)?,
            _ => return None,
        };
        let rank = graph.known_shape(id)?.len();
        (axis + rows_at == rank && rows_at == 2).then(|| (at, source.operands.clone()))
    };
    let parts = (
        joined(first_node, if first_matmul.transpose_y { 2 } else { 1 }),
        joined(second_node, if second_matmul.transpose_y { 1 } else { 2 }),
    );
    let mut operands = vec![first_node.operands[0].clone()];
    let joined = match parts {
        (Some((k, keys)), Some((v, values))) if keys.len() == values.len() => {
            nodes.extend([k, v]);
            let joined = keys.len();
            operands.extend(keys);
            operands.extend(values);
            joined
        }
        _ => {
            operands.extend([first_node.operands[1].clone(), second_node.operands[1].clone()]);
            1
        }
    };
    let first_external = operands.len();
    operands.extend(node.operands.iter().enumerate().filter(|(i, _)| *i != index).map(|(_, o)| o.clone()));
    let externals = &operands[first_external..];
    let skip = masks.skip(&rows, scores, len, m.min(m2), externals);
    let computed = computed_mask(&rows, scores, externals);
    let attention = Attention {
        first: first_matmul,
        second: second_matmul,
        rows,
        scores,
        probabilities,
        len,
        joined,
        skip,
        computed,
        shape: out_shape,
        dtype,
    };
    debug_assert_eq!(attention.len, len);
    let work = Work::Attention(Box::new(attention));
    let outputs = second_node.outputs.clone();
    Some((nodes, Node::new(&second_node.kind, work, operands, outputs)))
}

fn is_value(operand: &Operand, id: ValueId) -> bool {
    matches!(operand, Operand::Value(v) if *v == id)
}

fn alone(graph: &Graph, node: &Node, op: &dyn Op) -> Option<RowProgram> {
    let shapes = graph.operand_shapes(&node.operands)?;
    let step = op.by_rows(&shapes)?.pop()?;
    let (lead, len) = crate::ops::split_last(shapes[0]);
    let operand = tile::Operand::External { index: 0, lead: lead.to_vec(), len };
    let lines = vec![tile::Line { step, operands: vec![operand], result: 0 }];
    Some(RowProgram { rows: count(lead), registers: vec![len], lines, results: vec![0] })
}

/// The program with its external operand `index` turned into a register that the caller fills. `None` when the operand
/// is not read row for row.
fn take_scores(mut program: RowProgram, index: usize, len: usize) -> Option<(RowProgram, usize)> {
    program.registers.push(len);
    let scores = program.registers.len() - 1;
    for line in &mut program.lines {
        for o in &mut line.operands {
            if let tile::Operand::External { index: i, lead, len: width } = o {
                if *i == index {
                    if count(lead) != program.rows || *width != len {
                        return None;
                    }
                    *o = tile::Operand::Register(scores);
                } else if *i > index {
                    *i -= 1;
                }
            }
        }
    }
    // If the scores are read once, the step that reads them may write over them.
    let reads = |l: &tile::Line| {
        l.operands.iter().filter(|o| matches!(o, tile::Operand::Register(r) if *r == scores)).count()
    };
    if program.lines.iter().map(reads).sum::<usize>() == 1
        && let Some(i) = program.lines.iter().position(|l| reads(l) == 1)
    {
        let line = &program.lines[i];
        let in_place = matches!(line.step, Step::Unary { .. } | Step::Binary { .. } | Step::Softmax { .. });
        if in_place && program.registers[line.result] == len {
            let old = line.result;
            for line in &mut program.lines {
                if line.result == old {
                    line.result = scores;
                }
                for o in &mut line.operands {
                    if matches!(o, tile::Operand::Register(r) if *r == old) {
                        *o = tile::Operand::Register(scores);
                    }
                }
            }
            program.results.iter_mut().filter(|r| **r == old).for_each(|r| *r = scores);
            program.registers[old] = 0;
        }
    }
    Some((program, scores))
}

/// The mask of a program of the form scale, add a computed mask, softmax, all in the register of scores.
fn computed_mask(program: &RowProgram, scores: usize, operands: &[Operand]) -> Option<ComputedMask> {
    let in_place = |l: &tile::Line| {
        let reads = l.operands.iter().any(|o| matches!(o, tile::Operand::Register(r) if *r == scores));
        l.result == scores && reads
    };
    let [scales @ .., mask, last] = program.lines.as_slice() else { return None };
    let scaled = |l: &tile::Line| matches!(l.step, Step::Binary { op: Binary::Mul | Binary::Div, .. });
    let of_the_form = program.lines.iter().all(in_place)
        && scales.iter().all(scaled)
        && matches!(mask.step, Step::Binary { op: Binary::Add, .. })
        && matches!(last.step, Step::Softmax { .. });
    if !of_the_form {
        return None;
    }
    mask.operands.iter().find_map(|o| match o {
        tile::Operand::External { index, lead, len } if matches!(operands[*index], Operand::Value(_)) => {
            Some(ComputedMask { index: *index, lead: lead.clone(), len: *len })
        }
        _ => None,
    })
}
