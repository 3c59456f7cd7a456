//! Finds chains of row operations, and attention, and makes each one node.
//!
//! A group collects operations over the same rows, each joined to a group that computes one of its operands, as long
//! as nothing outside the group lies on a way from the group to the newcomer. Groups of one stay as they are.

use std::collections::{BinaryHeap, HashMap, HashSet};

use kvbaton_mil::program::ValueId;

use crate::attention;
use crate::graph::{Graph, Node, RowResult, Work};
use crate::ops::{Op, Operand, split_last};
use crate::tensor::count;
use crate::tile::{self, Line, RowProgram, Step};

/// Fuses what can be fused, in place.
pub(crate) fn fuse(graph: &mut Graph) {
    let groups = Groups::find(graph);
    rebuild(graph, &groups);
    attention::fuse(graph);
    for node in &mut graph.nodes {
        match &mut node.work {
            Work::Cond(blocks) => blocks.iter_mut().for_each(fuse),
            Work::Loop { test, body, .. } => {
                fuse(test);
                fuse(body);
            }
            Work::Op(_) | Work::Rows(..) | Work::Attention(_) => {}
        }
    }
}

struct Groups {
    /// The group of each node.
    of: Vec<usize>,
    /// Nodes of each group, in order.
    members: Vec<Vec<usize>>,
}

/// What a node is to its group.
enum Role {
    Steps(Vec<Step>),
    /// Shows an operand under another shape.
    Alias,
}

fn op_of(node: &Node) -> Option<&dyn Op> {
    match &node.work {
        Work::Op(op) => Some(op.as_ref()),
        _ => None,
    }
}

fn role(graph: &Graph, node: &Node) -> Option<Role> {
    let shapes = graph.operand_shapes(&node.operands)?;
    graph.outputs_known(node).then_some(())?;
    let op = op_of(node)?;
    if op.keeps_rows(&shapes) { Some(Role::Alias) } else { op.by_rows(&shapes).map(Role::Steps) }
}

impl Graph {
    fn shape(&self, id: ValueId) -> &[usize] {
        self.known_shape(id).unwrap_or(&[])
    }

    fn outputs_known(&self, node: &Node) -> bool {
        node.outputs.iter().all(|id| self.known_shape(*id).is_some())
    }

    /// Outer dimensions of a node's results.
    fn lead(&self, node: &Node) -> &[usize] {
        split_last(self.shape(node.outputs[0])).0
    }

    pub(crate) fn producers(&self) -> HashMap<ValueId, usize> {
        let mut producer = HashMap::new();
        for (i, node) in self.nodes.iter().enumerate() {
            producer.extend(node.outputs.iter().map(|id| (*id, i)));
        }
        producer
    }
}

impl Groups {
    fn find(graph: &Graph) -> Groups {
        let producer = graph.producers();
        let mut groups = Groups { of: Vec::new(), members: Vec::new() };
        for (i, node) in graph.nodes.iter().enumerate() {
            let home = groups.home(graph, &producer, node);
            let group = home.unwrap_or_else(|| {
                groups.members.push(Vec::new());
                groups.members.len() - 1
            });
            groups.of.push(group);
            groups.members[group].push(i);
        }
        groups
    }

    /// The group that `node`, the next one, can join.
    fn home(&self, graph: &Graph, producer: &HashMap<ValueId, usize>, node: &Node) -> Option<usize> {
        let role = role(graph, node)?;
        let lead = graph.lead(node);
        let mut candidates: Vec<usize> = Vec::new();
        for id in node.reads() {
            let Some(group) = producer.get(&id).map(|p| self.of[*p]) else { continue };
            // Every operand from the group must have the node's rows, one for one.
            let from = split_last(graph.shape(id)).0;
            let aligned = match role {
                Role::Steps(_) => from == lead,
                Role::Alias => count(from) == count(lead),
            };
            if !aligned {
                candidates.retain(|g| *g != group);
            } else if self.takes(graph, group, count(lead)) && !candidates.contains(&group) {
                candidates.push(group);
            }
        }
        let misaligned = |group: usize| {
            node.reads().any(|id| {
                let from = split_last(graph.shape(id)).0;
                producer.get(&id).is_some_and(|p| self.of[*p] == group) && count(from) != count(lead)
            })
        };
        candidates.sort_unstable();
        candidates.into_iter().rev().find(|g| !misaligned(*g) && !self.reaches(graph, producer, *g, node))
    }

    /// Whether the group computes row operations over so many rows.
    fn takes(&self, graph: &Graph, group: usize, rows: usize) -> bool {
        let first = &graph.nodes[self.members[group][0]];
        matches!(role(graph, first), Some(Role::Steps(_))) && count(graph.lead(first)) == rows
    }

    /// Whether a way leads from `group` through other groups to `node`.
    fn reaches(&self, graph: &Graph, producer: &HashMap<ValueId, usize>, group: usize, node: &Node) -> bool {
        let sources = |node: &Node| -> Vec<usize> {
            node.reads().filter_map(|id| producer.get(&id)).map(|p| self.of[*p]).collect()
        };
        let mut seen: HashSet<usize> = HashSet::new();
        let mut open: Vec<usize> = sources(node).into_iter().filter(|g| *g != group).collect();
        while let Some(g) = open.pop() {
            if g == group {
                return true;
            }
            if seen.insert(g) {
                open.extend(
                    self.members[g].iter().flat_map(|m| sources(&graph.nodes[*m])).filter(|s| *s != g),
                );
            }
        }
        false
    }
}

/// Replaces groups by nodes and puts all nodes in an order that respects their operands.
fn rebuild(graph: &mut Graph, groups: &Groups) {
    let readers = {
        let mut readers: HashMap<ValueId, HashSet<usize>> = HashMap::new();
        for (i, node) in graph.nodes.iter().enumerate() {
            for id in node.reads() {
                readers.entry(id).or_default().insert(groups.of[i]);
            }
        }
        for id in graph.kept() {
            // No group has this number: somebody outside reads it.
            readers.entry(id).or_default().insert(usize::MAX);
        }
        readers
    };
    let mut old: Vec<Option<Node>> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
    let mut nodes = Vec::with_capacity(groups.members.len());
    for (g, members) in groups.members.iter().enumerate() {
        let mut taken: Vec<Node> =
            members.iter().map(|m| old[*m].take().expect("a node is in one group")).collect();
        if taken.len() == 1 {
            nodes.extend(taken.pop());
            continue;
        }
        let outside = |id: &ValueId| readers.get(id).is_some_and(|r| r.iter().any(|reader| *reader != g));
        nodes.push(merge(graph, taken, outside));
    }
    graph.nodes = nodes;
    sort(graph);
}

/// One node for a group.
fn merge(graph: &Graph, members: Vec<Node>, outside: impl Fn(&ValueId) -> bool) -> Node {
    let mut program = RowProgram { rows: count(graph.lead(&members[0])), ..RowProgram::default() };
    let mut register: HashMap<ValueId, usize> = HashMap::new();
    let mut operands: Vec<Operand> = Vec::new();
    let mut external: HashMap<ValueId, usize> = HashMap::new();
    for node in &members {
        let lead = graph.lead(node);
        match role(graph, node).expect("members have a role") {
            Role::Alias => {
                let source = node.reads().find_map(|id| register.get(&id)).copied();
                register.insert(node.outputs[0], source.expect("an alias joins the group of its operand"));
            }
            Role::Steps(steps) => {
                for (step, output) in steps.into_iter().zip(&node.outputs) {
                    let len = split_last(graph.shape(*output)).1;
                    let own = matches!(step, Step::Slice { .. } | Step::Concat | Step::Reduce { .. });
                    let line_operands = node
                        .operands
                        .iter()
                        .map(|o| {
                            let shape = match o {
                                Operand::Value(id) => graph.shape(*id),
                                Operand::Fixed(t) => &t.shape,
                            };
                            let len = if own { split_last(shape).1 } else { len };
                            let index = match o {
                                Operand::Value(id) => {
                                    if let Some(r) = register.get(id) {
                                        return tile::Operand::Register(*r);
                                    }
                                    *external.entry(*id).or_insert_with(|| {
                                        operands.push(o.clone());
                                        operands.len() - 1
                                    })
                                }
                                Operand::Fixed(_) => {
                                    operands.push(o.clone());
                                    operands.len() - 1
                                }
                            };
                            tile::Operand::External { index, lead: lead.to_vec(), len }
                        })
                        .collect();
                    program.registers.push(len);
                    let result = program.registers.len() - 1;
                    program.lines.push(Line { step, operands: line_operands, result });
                    register.insert(*output, result);
                }
            }
        }
    }
    // Results that nobody in or outside the group reads are not computed.
    let (mut outputs, mut results, mut row_results) = (Vec::new(), Vec::new(), Vec::new());
    for id in members.iter().flat_map(|n| &n.outputs).filter(|id| outside(id)) {
        outputs.push(*id);
        // Two views of one register are one result.
        let index = results.iter().position(|r| *r == register[id]).unwrap_or_else(|| {
            results.push(register[id]);
            results.len() - 1
        });
        let dtype = graph.values[id.0 as usize].dtype.expect("results of rows are tensors");
        row_results.push(RowResult { index, dtype, shape: graph.shape(*id).to_vec() });
    }
    program.results = results;
    program.drop_unused();
    program.reuse_registers();
    let kind = members.last().map_or_else(String::new, |n| n.kind.clone());
    Node::new(&kind, Work::Rows(program, row_results), operands, outputs)
}

/// Orders nodes so that each follows the producers of its operands, otherwise as they were.
pub(crate) fn sort(graph: &mut Graph) {
    let producer = graph.producers();
    let n = graph.nodes.len();
    let mut waits = vec![0usize; n];
    let mut followers: Vec<Vec<usize>> = vec![Vec::new(); n];
    for (i, node) in graph.nodes.iter().enumerate() {
        let sources: HashSet<usize> = node.reads().filter_map(|id| producer.get(&id).copied()).collect();
        waits[i] = sources.len();
        for s in sources {
            followers[s].push(i);
        }
    }
    // The earliest ready node first: a heap of reversed positions.
    let mut ready: BinaryHeap<std::cmp::Reverse<usize>> =
        (0..n).filter(|i| waits[*i] == 0).map(std::cmp::Reverse).collect();
    let mut old: Vec<Option<Node>> = std::mem::take(&mut graph.nodes).into_iter().map(Some).collect();
    while let Some(std::cmp::Reverse(i)) = ready.pop() {
        graph.nodes.push(old[i].take().expect("a node is ready once"));
        for f in &followers[i] {
            waits[*f] -= 1;
            if waits[*f] == 0 {
                ready.push(std::cmp::Reverse(*f));
            }
        }
    }
    debug_assert_eq!(graph.nodes.len(), n, "joining groups made no cycle");
}
