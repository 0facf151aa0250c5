//! A container for the groups of each memory node, as one back end.

mod charges;
mod dirty;
mod faults;
mod groups;
mod model;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::plain_kernel::setup::*;
use crate::plain_kernel::*;
use ioas::{
    Area, Endpoint, Errno, Ioas, KernelError, Ledger, MapError, Memory, Placement, Profile,
};
use iommu::NodeId;
use iopt::Prot;
use runs::{Iova, Offset, Span};

const ALL: Span<Offset> = Span::new(0, 2 * MIB);

/// An address space over containers of the model.
pub(crate) struct Bench {
    pub(crate) world: Arc<Mutex<World>>,
    pub(crate) space: Ioas,
    pub(crate) ledger: Arc<Ledger>,
    /// No more containers can be opened.
    full: Arc<AtomicBool>,
}

pub(crate) fn node(number: u32) -> Option<NodeId> {
    Some(NodeId(number))
}

pub(crate) fn group() -> Arc<Device> {
    Arc::new(Device {
        tracks: true,
        ..Device::default()
    })
}

impl Bench {
    pub(crate) fn new(granule: Option<u64>, limit: u64) -> Self {
        let world = World::new(Profile::Type1);
        let full = Arc::new(AtomicBool::new(false));
        let open = {
            let (world, full) = (Arc::clone(&world), Arc::clone(&full));
            move || match full.load(Ordering::Relaxed) {
                true => Err(KernelError::Refused {
                    operation: "open",
                    errno: Errno::EPERM.0,
                }),
                false => Ok(PlainType1::new(&world, &Arc::default())),
            }
        };
        let space = Ioas::options().granule(granule).over_mappers(open).unwrap();
        space.set_placement(Placement::PerNode).unwrap();
        Self {
            space,
            ledger: Ledger::new("mm->locked_vm", Some(limit), 0),
            world,
            full,
        }
    }

    /// With a group at each of these nodes.
    fn with(nodes: &[u32], limit: u64) -> (Self, Vec<Arc<Device>>) {
        let bench = Self::new(None, limit);
        let attach = |number: &u32| {
            let group = group();
            bench
                .space
                .attach(Endpoint::from(group.clone()).near(node(*number)))
                .unwrap();
            group
        };
        let groups = nodes.iter().map(attach).collect();
        (bench, groups)
    }

    pub(crate) fn memory(&self, len: u64) -> Arc<Memory> {
        let (address, file) = (Some(1 << 40), None);
        Memory::new(Arc::new(Fake { len, address, file }), &self.ledger)
    }

    fn map(&mut self, iova: u64, memory: &Arc<Memory>, part: Span<Offset>) -> Result<(), MapError> {
        self.space.map(iova, memory, part, Prot::RW)
    }

    /// Node and number of groups of each container.
    fn nodes(&self) -> Vec<(Option<u32>, usize)> {
        let all = self.space.places().into_iter();
        all.map(|place| (place.node.map(|node| node.0), place.endpoints.len()))
            .collect()
    }

    /// The model's container of each of ours.
    pub(crate) fn spaces(&self) -> Vec<usize> {
        let all = self.space.places().into_iter();
        all.map(|place| place.number.unwrap() as usize).collect()
    }

    /// Every container maps every area that is there, and nothing else; the ledger has what the kernel
    /// has locked, and what is kept for released areas. Closed containers map nothing.
    pub(crate) fn check(&self) {
        let world = self.world.lock().unwrap();
        let spaces = self.spaces();
        for (n, address) in world.spaces.iter().enumerate() {
            let closed = !spaces.contains(&n);
            assert_eq!(address.closed, closed, "container {n}");
            assert!(!closed || address.mappings.is_empty(), "container {n}");
        }
        let mut mappings = self.space.kernel_mappings().unwrap();
        for place in self.space.places() {
            let space = place.number.unwrap() as usize;
            let rest = mappings.split_off(place.mappings as usize);
            let ours = std::mem::replace(&mut mappings, rest);
            let mappings = world.spaces[space].mappings.iter();
            let there: Vec<Span<Iova>> = mappings
                .map(|(start, mapping)| Span::new(*start, mapping.len))
                .collect();
            assert_eq!(there, ours);
            let mapped: u64 = there.iter().map(|piece| piece.len).sum();
            let areas = || {
                self.space
                    .areas()
                    .into_iter()
                    .filter(|area| area.is_there())
            };
            assert_eq!(mapped, areas().map(|area| area.range().len).sum::<u64>());
            for area in areas() {
                for at in [0, area.range().len - PAGE] {
                    let found = world.translate(space, area.range().start + at);
                    assert_eq!(found, Some((1 << 40) + area.part().start + at));
                }
            }
        }
        let released = |area: &Area| area.is_released() && !area.is_out();
        let released = self.space.areas().into_iter().filter(released);
        let kept: u64 = released.map(|area| area.range().len).sum();
        let kept = kept * spaces.len() as u64;
        assert_eq!(world.locked() + kept, self.ledger.in_use());
    }
}
