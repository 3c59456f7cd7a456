//! (doc)

pub mod rows;
