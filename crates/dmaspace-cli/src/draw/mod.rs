//! What reports and pictures of several commands are made of.

pub(crate) mod sheet;
pub(crate) mod svg;
pub(crate) mod terminal;
