//! Reasons for which a check ends early.

use dmaspace::devices::{DevicesError, NotReady};
use ioas::{Errno, KernelError};
use iommu::NodeId;

use super::Step;

/// Why a check was not done. Everything was given back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The request makes no sense, or is for more than there is.
    #[error("{0}")]
    Input(String),
    /// The watcher wanted to stop.
    #[error("interrupted at {}; nothing is left pinned", .0.name())]
    Interrupted(Step),
    /// A device has made no access for a minute.
    #[error("a device has stopped at {}", .0.name())]
    Stuck(Step),
    /// The memory cannot be had.
    #[error("cannot get the memory")]
    Mapping(#[from] hostmem::MappingError),
    /// The memory cannot be brought in.
    #[error("cannot bring the memory in")]
    Populate(#[from] hostmem::PopulateError),
    /// The machine does not say what it has.
    #[error("cannot learn what the machine has")]
    Probe(#[from] hostmem::ProbeError),
    /// The limits on locked memory are not known.
    #[error("cannot learn the limits on locked memory")]
    Limits(#[from] hostmem::LimitsError),
    /// Memory cannot be pinned at all.
    #[error("cannot pin memory")]
    Pinner(#[from] hostmem::PinnerError),
    /// The kernel does not tell where memory lies.
    #[error("cannot learn where the memory lies")]
    Look(#[from] hostmem::PlacementError),
    /// The memory cannot be given back to the machine.
    #[error("cannot discard memory")]
    Discard(#[from] hostmem::DiscardError),
    /// The guest's memory is no memory of a guest.
    #[error("cannot describe the memory to a balloon")]
    Ram(#[from] virtio_balloon::BadRam),
    /// There is no memory for the tables.
    #[error("cannot get memory for the page tables")]
    TableMemory(#[source] ioas::Cause),
    /// The memory for the tables is not usable.
    #[error("cannot use the memory for the page tables")]
    Arena(#[from] iopt::ArenaError),
    /// A table cannot be built.
    #[error("cannot build a page table")]
    Table(#[from] iopt::BuildError),
    /// The memory cannot be mapped.
    #[error("cannot map the memory")]
    Map(#[source] ioas::MapError),
    /// The memory cannot be mapped again, to compare.
    #[error("cannot map the memory a second time, to compare")]
    MapAgain(#[from] iopt::TableMapError),
    /// The second map cannot be undone.
    #[error("cannot unmap what was mapped a second time")]
    UnmapAgain(#[from] iopt::TableUnmapError),
    /// The physical runs of pinned memory cannot be read.
    #[error("cannot find the physical runs of pinned memory")]
    Runs(#[source] ioas::Cause),
    /// The mapped memory cannot be held.
    #[error("cannot hold memory that is mapped")]
    Hold(#[from] ioas::PinError),
    /// A device of the software unit cannot be attached.
    #[error("cannot attach a device")]
    Attach(#[from] ioas::AttachError),
    /// There can be no thread for a device.
    #[error("cannot start a device")]
    Thread(#[source] std::io::Error),
    /// A page cannot be taken out.
    #[error("cannot unmap a page")]
    Hole(#[source] ioas::UnmapError),
    /// Writes of devices cannot be tracked.
    #[error("cannot track what devices write to")]
    Track(#[from] ioas::TrackingError),
    /// There is no bitmap for it.
    #[error("cannot make a bitmap of dirty pages")]
    Pending(#[from] iopt::PendingError),
    /// Dirty pages cannot be learned.
    #[error("cannot harvest dirty pages")]
    Harvest(#[from] ioas::HarvestError),
    /// A unit did not invalidate in time.
    #[error("cannot flush what was harvested")]
    Flush(#[from] iommu::FlushError),
    /// The memory cannot be unmapped.
    #[error("cannot unmap the memory")]
    Unmap(#[source] ioas::UnmapError),
    /// The address space does not end.
    #[error("cannot close the address space")]
    Close(#[from] ioas::CloseError),
    /// The machine's devices cannot be listed.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// A device cannot be used, or not yet.
    #[error(transparent)]
    NotReady(#[from] NotReady),
    /// A device, or what belongs to it, cannot be opened.
    #[error("cannot open {address}")]
    Open {
        /// Its address.
        address: String,
        /// Why.
        source: KernelError,
    },
    /// The kernel does not attach a device.
    #[error("cannot attach {address}{hint}")]
    Enter {
        /// Its address.
        address: String,
        /// A likely reason; empty when none is known.
        hint: &'static str,
        /// Why.
        source: ioas::AttachError,
    },
    /// The back end cannot place tables so.
    #[error("{0}")]
    Placement(#[from] ioas::Unsupported),
    /// Tables were wanted on a node without memory.
    #[error("the machine has no memory on node {}; nodes that have: {}", .node.0, listed(.nodes))]
    NoNode {
        /// The node.
        node: NodeId,
        /// Nodes with memory.
        nodes: Vec<u32>,
    },
}

fn listed(nodes: &[u32]) -> String {
    let nodes: Vec<_> = nodes.iter().map(u32::to_string).collect();
    nodes.join(", ")
}

impl CheckError {
    /// An error of a map, at this step.
    pub(super) fn of_map(cause: ioas::MapError, step: Step) -> Self {
        match cause {
            ioas::MapError::Interrupted => Self::Interrupted(step),
            cause => Self::Map(cause),
        }
    }

    /// An error of attaching a device of the machine.
    ///
    /// Source: `modinfo vfio_iommu_type1`, `modinfo iommufd`: the parameter `allow_unsafe_interrupts`.
    pub(super) fn enter(address: &str, source: ioas::AttachError) -> Self {
        let cause = match &source {
            ioas::AttachError::Kernel(cause) => cause.downcast_ref(),
            _ => None,
        };
        let hint = match cause {
            Some(KernelError::Refused { errno, .. }) if Errno(*errno) == Errno::EPERM => {
                " (where interrupts are not remapped, the kernel requires the parameter \
                 allow_unsafe_interrupts=1 of vfio_iommu_type1, or of iommufd)"
            }
            _ => "",
        };
        Self::Enter {
            address: address.into(),
            hint,
            source,
        }
    }

    /// True when the request is at fault and not this program: another size, backing, limit or device could succeed on
    /// the same machine.
    pub const fn is_input(&self) -> bool {
        matches!(
            self,
            Self::Input(_)
                | Self::Mapping(_)
                | Self::Populate(_)
                | Self::NotReady(_)
                | Self::Open { .. }
                | Self::Enter { .. }
                | Self::Placement(_)
                | Self::NoNode { .. }
                | Self::Map(
                    ioas::MapError::OverLimit(_)
                        | ioas::MapError::Pin(_)
                        | ioas::MapError::NoRoom { .. }
                )
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_for_want_of_permission_comes_with_a_likely_reason() {
        let said = |errno: Errno| {
            let operation = "VFIO_SET_IOMMU";
            let cause = KernelError::Refused {
                operation,
                errno: errno.0,
            };
            let cause = ioas::AttachError::Kernel(Box::new(cause));
            CheckError::enter("0000:00:05.0", cause).to_string()
        };
        assert!(said(Errno::EPERM).contains("allow_unsafe_interrupts=1"));
        assert_eq!(said(Errno::ENODEV), "cannot attach 0000:00:05.0");
    }
}
