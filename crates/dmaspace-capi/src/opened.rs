//! An address space with what this interface keeps beside it: who is attached, by the caller's numbers,
//! and where its memory is charged.

use std::mem;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use dmaspace::ioas::{
    CloseError, DetachError, Endpoint, EndpointId, HostTables, Ioas, Kernel, Mapper,
};
use dmaspace::iommu::DeviceId;

use crate::memory::Counted;
use crate::status::{Failure, Result, Status};
use crate::unit::Callbacks;

#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) space: Ioas,
    /// To what memory is charged that it maps.
    pub(crate) counted: Counted,
    attached: Attached,
}

/// How devices are attached.
#[derive(Debug)]
enum Attached {
    /// By the number that the caller's unit knows.
    Numbers {
        unit: Arc<Callbacks>,
        tables: Arc<HostTables>,
    },
    /// By a file of the kernel's, and a number for it.
    Files {
        endpoint: fn(u32, OwnedFd) -> Endpoint,
        known: Vec<(u32, EndpointId)>,
    },
}

impl Opened {
    /// Over tables of ours in `tables`, which the caller's `unit` walks.
    pub(crate) const fn over_tables(
        space: Ioas,
        unit: Arc<Callbacks>,
        tables: Arc<HostTables>,
    ) -> Self {
        Self {
            space,
            counted: Counted::Here,
            attached: Attached::Numbers { unit, tables },
        }
    }

    /// Over mappings of the kernel; `granule`: see [`Kernel::new`], 0 for none.
    pub(crate) fn over_kernel(
        mapper: impl Mapper,
        granule: u64,
        counted: Counted,
        endpoint: fn(u32, OwnedFd) -> Endpoint,
    ) -> Self {
        let granule = (granule > 0).then_some(granule);
        let known = Vec::new();
        Self {
            space: Ioas::over_kernel(Kernel::new(mapper, granule)),
            counted,
            attached: Attached::Files { endpoint, known },
        }
    }

    fn unsupported(&self, what: &str) -> Failure {
        let name = self.space.capabilities().backend;
        Failure::new(Status::Unsupported, format!("{name} {what}"))
    }

    /// Attaches the device that the caller's unit knows by this number.
    pub(crate) fn attach(&self, device: u32) -> Result<()> {
        match &self.attached {
            Attached::Numbers { unit, .. } => {
                Ok(self.space.attach((Arc::clone(unit), DeviceId(device)))?)
            }
            Attached::Files { .. } => Err(self.unsupported("attaches devices by their files")),
        }
    }

    /// Attaches the device or group that `file` is open for.
    pub(crate) fn attach_file(&mut self, number: u32, file: OwnedFd) -> Result<()> {
        let Attached::Files { endpoint, known } = &mut self.attached else {
            let message = "a unit of the caller's knows devices by their number alone";
            return Err(Failure::new(Status::Unsupported, message));
        };
        if known.iter().any(|(other, _)| *other == number) {
            let message = format!("{number} is attached to this address space already");
            return Err(Failure::new(Status::Device, message));
        }
        let endpoint = endpoint(number, file);
        let id = endpoint.id();
        self.space.attach(endpoint)?;
        known.push((number, id));
        Ok(())
    }

    pub(crate) fn detach(&mut self, number: u32) -> Result<()> {
        match &mut self.attached {
            Attached::Numbers { .. } => Ok(self.space.detach(DeviceId(number))?),
            Attached::Files { known, .. } => {
                let place = known.iter().position(|(other, _)| *other == number);
                let place = place.ok_or(DetachError::Unknown)?;
                self.space.detach(known[place].1)?;
                known.remove(place);
                Ok(())
            }
        }
    }

    /// Refuses what only tables of ours can answer.
    pub(crate) fn shows_tables(&self) -> Result<()> {
        match &self.attached {
            Attached::Numbers { .. } => Ok(()),
            Attached::Files { .. } => Err(self.unsupported("does not show its tables")),
        }
    }

    /// Ends it: what cannot be given back is lost on purpose.
    pub(crate) fn close(self) -> std::result::Result<(), CloseError> {
        let closed = self.space.close();
        if let (Err(_), Attached::Numbers { tables, .. }) = (&closed, self.attached) {
            // A device may still walk what lies there.
            mem::forget(tables);
        }
        closed
    }
}
