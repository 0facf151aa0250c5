//! virtio-iommu: a virtual IOMMU for guests (VIRTIO 1.3, 5.13, IOMMU device), over I/O address spaces.
//!
//! A guest's driver attaches devices, here called *endpoints*, to domains, and maps its memory in these.
//! Each domain is an [`ioas::Ioas`]: a MAP request is one operation on it, by runs, pinned and charged as
//! everything else there; the last endpoint that leaves a domain ends it, and everything is given back.
//!
//! * [`Device`] is the device, without a transport: features, configuration space, requests, faults, bypass
//!   mode, reset. [`Config`] says what it offers, and whom it translates for.
//! * [`Domains`] is the seam to who makes address spaces and attaches endpoints to them; [`Units`] does so
//!   with page tables of ours and any [`iommu::Unit`].
//! * [`wire`] has the messages, [`features`] the feature bits. [`Fault`] is what the driver receives for an access
//!   that was blocked, [`Refusal`] what the monitor receives for a request that is refused.
//!
//! Where memory is, a monitor says by [`Region`]s: addresses of requests are the guest's. Nothing panics on
//! any input, and nothing that a request names is allocated without a limit.
//! `tests/device/requirements.txt` in the repository has the standard's requirements, each with its tests.
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::AtomicU64;
//!
//! use ioas::{DomainIds, Ledger, Memory, Synthetic};
//! use iommu::{DeviceId, RunMap, SoftwareUnit};
//! use iopt::{FormatId, HeapTables};
//! use runs::Span;
//! use virtio_iommu::{Config, Device, Endpoint, Region, Units};
//!
//! // A unit, which walks tables for the guest's devices: here the one in software.
//! let tables = Arc::new(HeapTables::with_tables(64)?);
//! let data = RunMap::<Vec<AtomicU64>>::new([])?;
//! let unit = Arc::new(SoftwareUnit::new(tables.clone(), data));
//!
//! // The guest's endpoint 8 is its device 00:01.0. The guest learns that by ACPI's table VIOT.
//! let mut units = Units::new(tables, DomainIds::new(16), [FormatId::VtdSs]);
//! units.insert(8, unit, DeviceId::pci(0, 1, 0));
//! let mut device = Device::new(
//!     Config {
//!         // What four levels of tables reach.
//!         input: Some(0..=(1 << 48) - 1),
//!         endpoints: vec![Endpoint::new(8)],
//!         ..Config::default()
//!     },
//!     units,
//! )?;
//!
//! // The guest's memory. A monitor has it of `ioas::GuestRam`; this one is not really there.
//! let ledger = Ledger::new("guest", Some(1 << 30), 0);
//! let ram = Synthetic::new([Span::new(0x1_0000_0000, 1 << 30)]);
//! let ram = Memory::new(Arc::new(ram), &ledger);
//! device.set_memory(vec![Region::new(0, ram)])?;
//!
//! // The transport negotiates features. From then on, whenever the driver has notified a queue:
//! // `device.requests(&mut queue, &memory)`, and `device.faults(...)` with what the unit has noted.
//! device.ack_features(device.features())?;
//! let mut page_sizes = [0; 8];
//! device.read_config(0, &mut page_sizes);
//! assert_eq!(u64::from_le_bytes(page_sizes), !0xfff);
//!
//! // The driver resets the device: endpoints reach nothing any more.
//! assert!(device.reset());
//! # Ok::<_, Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod config;
mod device;
mod domains;
mod fault;
pub mod features;
mod refusal;
pub mod wire;

pub use config::{Config, Endpoint, Region, SetupError};
pub use device::{Counters, Device, Error, NotOffered, Served};
pub use domains::{Domains, Units};
pub use fault::{Fault, Reason};
pub use refusal::{Failed, Refusal};
pub use wire::{
    DEVICE_ID, EVENT_QUEUE, NUM_QUEUES, QUEUE_SIZE, REQUEST_QUEUE, Reserved, ReservedKind, Status,
};
