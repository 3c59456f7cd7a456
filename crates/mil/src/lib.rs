//! Reads `.mlpackage` files.

pub mod program;
