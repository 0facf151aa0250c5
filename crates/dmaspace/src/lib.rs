//! Device memory for virtual machines, hypervisors and user-space drivers.
//!
//! For authors of monitors and drivers, who take the crates below from here, and for people who look into
//! a machine that they have: what the program `dmaspace` does is here as functions with reports as values.
//!
//! ```
//! use dmaspace::hostmem::{Backing, Mapping};
//! use dmaspace::{inspect::inspect, numa::Plan, topology::Topology};
//!
//! // How is this process's memory backed, and what would mapping it for a device cost?
//! let memory = Mapping::new(Backing::Anon4K, 4 << 20, None)?;
//! memory.populate(&mut |_| std::ops::ControlFlow::Continue(()))?;
//! let report = inspect(std::process::id(), false)?;
//! assert!(report.present_bytes >= 4 << 20);
//! for cost in &report.costs {
//!     println!("{}: {} leaves, {} bytes of tables", cost.format, cost.leaf_count, cost.table_bytes);
//! }
//! for advice in &report.advice {
//!     println!("{}: {}", advice.finding, advice.setting);
//! }
//!
//! // On which nodes would each policy put the tables of this machine's devices?
//! let machine = Topology::parse(
//!     r#"
//!     [[node]]
//!     id = 0
//!     memory_mib = 8192
//!     [[unit]]
//!     name = "dmar0"
//!     node = 0
//!     [[device]]
//!     address = "0000:00:05.0"
//!     unit = "dmar0"
//!     "#,
//! )?;
//! let plan = Plan::new(&machine, report.present_bytes);
//! assert!(!plan.policies.is_empty());
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is where
//!
//! * [`balloon`]: devices let go before a balloon's memory is discarded, and have it back before the guest;
//! * [`guest`]: a process in a guest that drives a balloon's device by itself;
//! * [`map`], and with their features `life` and `bench`: the jobs of the commands of these names;
//! * [`devices`], [`topology`]: the machine's devices, and its memory nodes;
//! * [`inspect`](mod@inspect), [`tables`], [`geometry`]: processes and page tables of others, looked at;
//! * [`numa`]: plans, simulations and measurements of tables on memory nodes;
//! * the crates below, whole: [`runs`], [`iopt`], [`hostmem`], [`iommu`], [`ioas`], [`virtio_balloon`];
//!   with the feature `virtio-iommu` also `virtio_iommu`.
//!
//! A guide for each user is in `docs/guides` of the repository.

#![forbid(unsafe_code)]

pub mod balloon;
pub mod devices;
pub mod topology;

pub use {hostmem, ioas, iommu, iopt, runs, virtio_balloon};

#[cfg(feature = "virtio-iommu")]
pub use virtio_iommu;

/// The README's example is compiled and run as it stands.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
