//! An address space over the model, with one device.

use std::sync::{Arc, Mutex};

use ioas::{Ioas, Ledger, MapError, Mapper, Memory};
use iopt::Prot;
use runs::{Iova, Offset, Span};

use super::{Device, Fake, PAGE, Plain, World};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

pub(crate) struct Setup<const IOMMUFD: bool> {
    pub(crate) world: Arc<Mutex<World>>,
    pub(crate) space: Ioas,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) device: Arc<Device>,
}

pub(crate) fn setup<const IOMMUFD: bool>(granule: Option<u64>) -> Setup<IOMMUFD> {
    let world = World::new(Plain::<IOMMUFD>::PROFILE);
    let mapper = Plain::<IOMMUFD>::new(&world, &Arc::default());
    Setup {
        space: Ioas::options()
            .granule(granule)
            .over_mapper(mapper)
            .unwrap(),
        world,
        ledger: Ledger::new("mm->locked_vm", Some(64 * GIB), 0),
        device: Arc::default(),
    }
}

impl<const IOMMUFD: bool> Setup<IOMMUFD> {
    pub(crate) fn attached(granule: Option<u64>) -> Self {
        let setup = setup(granule);
        setup.space.attach(setup.device.clone()).unwrap();
        setup
    }

    /// Memory at an address of its own.
    pub(crate) fn memory(&self, address: u64, len: u64) -> Arc<Memory> {
        let (address, file) = (Some(address), None);
        Memory::new(Arc::new(Fake { len, address, file }), &self.ledger)
    }

    pub(crate) fn map(
        &mut self,
        iova: u64,
        memory: &Arc<Memory>,
        part: Span<Offset>,
    ) -> Result<(), MapError> {
        self.space.map(iova, memory, part, Prot::RW)
    }

    pub(crate) fn pieces(&self) -> Vec<Span<Iova>> {
        self.space.kernel_mappings().unwrap()
    }

    /// The model's mappings: they are what the back end believes, with a charge that agrees.
    pub(crate) fn check(&self) {
        let world = self.world.lock().unwrap();
        let mappings = world.spaces[0].mappings.iter();
        let there: Vec<Span<Iova>> = mappings
            .map(|(start, mapping)| Span::new(*start, mapping.len))
            .collect();
        assert_eq!(there, self.pieces());
        assert_eq!(world.locked(), self.ledger.in_use());
        if !world.spaces[0].devices.is_empty() {
            for area in self
                .space
                .areas()
                .into_iter()
                .filter(|area| area.is_there())
            {
                let base = area.memory().object().in_process().unwrap().address();
                for at in [0, area.range().len - PAGE] {
                    let found = world.translate(0, area.range().start + at);
                    assert_eq!(
                        found,
                        Some(base + area.part().start + at),
                        "{}",
                        area.range()
                    );
                }
            }
        }
    }
}
