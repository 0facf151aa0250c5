//! Common parts of the layers over the kernel's ioctls: the calls themselves, and their errors.
//!
//! VFIO and iommufd follow one convention: a structure begins with its size, the kernel reads and
//! writes no more of it than that, and later kernels know longer structures. [`sys`] writes the
//! size itself, so that no caller can announce more bytes than there are. `unsafe` is in it, in the
//! `sys` of each layer, and in the mapped registers of `vfio`.
//!
//! Structures and flags come from the crates that are generated from the kernel's headers; the
//! numbers of the requests, which those lack, stand beside each structure in the layers' `sys`. Tests
//! compare all of them with what a C compiler makes of the headers.
//!
//! The back end over a kernel's mappings ([`Kernel`]) builds on them. It is one for both; the
//! differences are behind [`Mapper`].

mod backend;
mod cause;
#[cfg(feature = "iommufd")]
pub mod iommufd;
mod locked;
mod mapper;
mod mappings;
mod open;
mod pieces;
mod refusals;
mod removal;
mod shares;
mod space;
pub(crate) mod sys;
#[cfg(feature = "vfio")]
pub mod vfio;

#[cfg(test)]
pub(crate) mod headers;

pub(crate) use crate::kernel_error::Result;
pub use crate::kernel_error::{AnswerError, KernelError};
pub(crate) use backend::Kernel;
pub use mapper::{Entering, MapSource, Mapper, MapperInfo};
pub use pieces::pieces_needed;
pub use shares::Shares;
