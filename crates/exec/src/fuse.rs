//! placeholder
pub(crate) fn fuse(_: &mut crate::graph::Graph, _: &kvbaton_mil::program::Function) {}
