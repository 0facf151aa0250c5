//! The virtio balloon: what goes over its queues, and the runs that come of it.
//!
//! For authors of monitors, who want the device; of guests' kernels, who want the driver; and of tools that read
//! or write its messages.
//!
//! A guest gives memory to its balloon by naming pages to the host. This crate has the wire formats
//! of the standard (Virtual I/O Device, VIRTIO, version 1.3, section 5.5, Traditional Memory Balloon
//! Device) and, beside them, formats that name pages in bulk, which `docs/balloon-bulk.md` specifies:
//!
//! * [`Format`] is the seam of them all. [`LePfns`] is the standard's; [`BitmapRecords`], [`Ranges`],
//!   [`Chunks`], [`SizedRuns`] and [`ScatterGather`] are in bulk, and [`BulkFormat`] is one of these,
//!   chosen at run time. [`Source`] cuts sorted runs into messages of bounded size; decoding hands
//!   runs to a closure and counts in [`Refusals`] whatever it does not take.
//! * [`MemoryMap`] resolves runs to [`Part`]s of the guest's memory, once, [`RunCollector`] sorts and merges
//!   these across the messages of a drained queue, and [`PartialHugePages`] remembers what is not yet a whole
//!   page of the host. Decoding, resolving and collecting do not depend on each other: runs and parts go from
//!   one to the next by closures.
//! * [`Features`] and [`BulkBit`], [`Queue`] numbers in both [`Numbering`]s, [`Config`] space, and
//!   [`Stats`].
//! * [`driver`] is the guest's end: [`Driver`], over small seams.
//! * [`Dma`] is the seam towards devices that reach the guest's memory by themselves.
//! * With the feature `device` (which needs `std`), `device::Device` is the host's side of all that.
//!
//! Addresses and lengths are bytes of the guest's physical address space, as [`runs::Span`]s, unless
//! a name says pages. A page *number* counts pages of 4 KiB ([`WIRE_PAGE`]), however large the guest's
//! own pages are. Nothing here allocates, and nothing panics on any input.
//!
//! ```
//! use runs::Span;
//! use virtio_balloon::{
//!     BitmapRecords, Format, GuestPage, MemoryMap, Part, Refusals, Region, RunCollector, Source,
//! };
//!
//! // Two stretches of the guest's memory become one message of three records.
//! let format = BitmapRecords::new(GuestPage::SIZE_4K);
//! let taken = [Span::new(0x20_0000, 2 << 20), Span::new(0x100_3000, 0x1000)];
//! let mut source = Source::new(taken, GuestPage::SIZE_4K);
//! let mut message = [0; 64];
//! let len = format.encode(&mut source, &mut message)?;
//! assert_eq!(len, 8 + 8 + 16);
//! assert_eq!(format.encode(&mut source, &mut message)?, 0, "nothing is left");
//!
//! // The device gets the same stretches back.
//! let regions = [Region::new(Span::new(0, 32 << 20))];
//! let map = MemoryMap::new(&regions).expect("whole pages");
//! let (mut refusals, mut outside) = (Refusals::new(), Refusals::new());
//! let mut room = [Part::default(); 16];
//! let mut collector = RunCollector::new(&mut room);
//! format.decode(&message[..len], &mut refusals, |run| {
//!     map.resolve(run, &mut outside, |part| collector.push(part, |_| unreachable!("there is room")));
//! });
//! collector.finish(|parts| assert!(parts.iter().map(|part| map.run(part)).eq(taken)));
//! assert_eq!(refusals.total() + outside.total(), 0);
//! # Ok::<_, virtio_balloon::EncodeError>(())
//! ```

#![no_std]
#![forbid(unsafe_code)]

#[cfg(any(test, feature = "device"))]
extern crate std;

mod collect;
mod config;
#[cfg(feature = "device")]
pub mod device;
mod dma;
pub mod driver;
mod features;
mod format;
mod map;
mod partial;
mod queues;
mod refusal;
mod source;
mod stats;

pub use collect::RunCollector;
pub use config::{BULK_CONFIG_BYTES, CONFIG_BYTES, Config};
pub use dma::{Dma, Reason};
pub use driver::{Driver, Wait};
pub use features::{BadBulkBit, BulkBit, Features};
pub use format::{
    BitmapRecords, BulkFormat, Chunks, Format, HostRequest, LePfns, MOST_DATA_BYTES,
    MOST_MESSAGE_BYTES, PageShifts, Ranges, ResponseHeader, ScatterGather, SizedRuns,
};
pub use map::{BadRam, MemoryMap, Part, Region, Resolver};
pub use partial::{BadRegion, PartialHugePages};
pub use queues::{Numbering, Queue};
pub use refusal::{Refusal, Refusals};
pub use source::{EncodeError, GuestPage, Source, Stretches, WIRE_PAGE};
pub use stats::{ByteOrder, Stat, Stats, Tag};
