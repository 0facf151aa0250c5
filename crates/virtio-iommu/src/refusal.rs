//! Refused requests, with the cause that the status only hints at.

use ioas::{AttachError, Cause, CloseError, DetachError, MapError, UnmapError};
use iopt::TableMapError;
use runs::{GuestAddr, Iova, Span};

use crate::wire::Status;

/// Refusal of a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The device-readable part is not in the guest's memory.
    #[error("{len} bytes of the request at {address:#x} cannot be read")]
    Unreadable {
        /// The buffer's address.
        address: u64,
        /// Its bytes.
        len: u32,
    },
    /// Bytes that are reserved are not zeros.
    #[error("reserved bytes are not zeros")]
    Reserved,
    /// Flags that are not known, or whose feature is not negotiated.
    #[error("flags {unknown:#x} are not known")]
    Flags {
        /// These.
        unknown: u32,
    },
    /// The domain's number is not among those that there can be.
    #[error("there can be no domain {domain}")]
    DomainRange {
        /// The domain.
        domain: u32,
    },
    /// There is no such endpoint.
    #[error("there is no endpoint {endpoint}")]
    NoEndpoint {
        /// Its number.
        endpoint: u32,
    },
    /// There is no such domain.
    #[error("there is no domain {domain}")]
    NoDomain {
        /// Its number.
        domain: u32,
    },
    /// The endpoint is not attached to the domain.
    #[error("endpoint {endpoint} is not attached to domain {domain}")]
    NotAttached {
        /// The endpoint.
        endpoint: u32,
        /// The domain.
        domain: u32,
    },
    /// The domain is there, and of the other kind: in bypass mode or not.
    #[error("domain {domain} exists, and its bypass mode is not the requested one")]
    OtherKind {
        /// The domain.
        domain: u32,
    },
    /// Nothing is mapped or unmapped in a bypass domain.
    #[error("domain {domain} is a bypass domain")]
    Bypass {
        /// The domain.
        domain: u32,
    },
    /// A range that ends before it begins.
    #[error("the range from {start:#x} to {end:#x} ends before it begins")]
    Order {
        /// The first address.
        start: u64,
        /// The last.
        end: u64,
    },
    /// A range that does not consist of whole pages.
    #[error("{value:#x} is not a multiple of {granule:#x} bytes")]
    Misaligned {
        /// The address where it begins, or the one behind its end.
        value: u64,
        /// The granularity.
        granule: u64,
    },
    /// A range outside of what the device translates.
    #[error("{start:#x} to {end:#x} is outside of the addresses that can be mapped")]
    Input {
        /// The first address.
        start: u64,
        /// The last.
        end: u64,
    },
    /// A range that is reserved for one of the domain's endpoints.
    #[error("{range} overlaps reserved memory of endpoint {endpoint}")]
    ReservedRange {
        /// The range.
        range: Span<Iova>,
        /// The endpoint.
        endpoint: u32,
    },
    /// The guest has nothing there.
    #[error("{start:#x} to {end:#x} is not all of it memory of the guest")]
    NotMemory {
        /// The first address in the guest's physical memory.
        start: u64,
        /// The last; it is less when the range ends beyond 2^64.
        end: u64,
    },
    /// Registers that are to be mapped as memory, or the other way round.
    #[error("{region} is memory to be mapped as registers, or registers as memory")]
    MemoryType {
        /// The guest addresses of the region.
        region: Span<GuestAddr>,
    },
    /// A mapping lies partly in the range.
    #[error("{start:#x} to {end:#x} cuts a mapping")]
    Cuts {
        /// The first address.
        start: u64,
        /// The last.
        end: u64,
    },
    /// A mapping of the domain lies where the endpoint cannot translate.
    #[error("the mapping {area} overlaps reserved memory of endpoint {endpoint}")]
    Incompatible {
        /// The endpoint.
        endpoint: u32,
        /// The mapping, or a part of it.
        area: Span<Iova>,
    },
    /// There are as many domains as there can be.
    #[error("there are {most} domains, as many as there can be")]
    Domains {
        /// [`VirtioIommuConfig::most_domains`](crate::VirtioIommuConfig::most_domains).
        most: usize,
    },
    /// The domain has as many mappings as it can have.
    #[error("there would be {wanted} mappings, and there can be {most}")]
    Mappings {
        /// Number of mappings that it would have.
        wanted: usize,
        /// [`VirtioIommuConfig::most_mappings`](crate::VirtioIommuConfig::most_mappings).
        most: usize,
    },
    /// The room for properties is not `probe_size`.
    #[error("{given} bytes for properties, which have {needed}")]
    Probe {
        /// Bytes that there are.
        given: usize,
        /// `probe_size`.
        needed: usize,
    },
    /// There is no address space for the domain.
    #[error("no address space for a domain")]
    Space(#[source] Cause),
    /// The endpoint cannot be attached.
    #[error("endpoint {endpoint} is not attached")]
    Attach {
        /// The endpoint.
        endpoint: u32,
        /// Cause.
        #[source]
        cause: AttachError,
    },
    /// The endpoint cannot be attached to a domain that others are attached to.
    #[error("endpoint {endpoint} does not join the others of domain {domain}")]
    Shared {
        /// The endpoint.
        endpoint: u32,
        /// The domain.
        domain: u32,
        /// Cause.
        #[source]
        cause: Box<Self>,
    },
    /// The endpoint, which is to be attached elsewhere, cannot be detached from its domain.
    #[error("endpoint {endpoint} does not leave its domain")]
    Stays {
        /// The endpoint.
        endpoint: u32,
        /// Cause.
        #[source]
        cause: DetachError,
    },
    /// The endpoint cannot be detached from where it is.
    #[error("endpoint {endpoint} is not detached")]
    Detach {
        /// The endpoint.
        endpoint: u32,
        /// Cause.
        #[source]
        cause: DetachError,
    },
    /// The address space refuses to map.
    #[error(transparent)]
    Map(MapError),
    /// The address space refuses to unmap.
    #[error(transparent)]
    Unmap(UnmapError),
    /// The device goes on only after a reset: see [`Failed::Stuck`].
    #[error("the device needs a reset")]
    NeedsReset,
}

impl RequestError {
    /// Status that the driver receives (5.13.6).
    pub fn status(&self) -> Status {
        match self {
            Self::Unreadable { .. } => Status::IoErr,
            // The last two whatever the cause is: ATTACH has no other status for them (5.13.6.3.2).
            Self::Incompatible { .. } | Self::Shared { .. } | Self::Stays { .. } => Status::Unsupp,
            Self::NeedsReset | Self::Detach { .. } => Status::DevErr,
            Self::Reserved
            | Self::Flags { .. }
            | Self::NotAttached { .. }
            | Self::OtherKind { .. }
            | Self::Bypass { .. }
            | Self::Order { .. }
            | Self::ReservedRange { .. }
            | Self::MemoryType { .. }
            | Self::Probe { .. } => Status::Inval,
            Self::DomainRange { .. }
            | Self::Misaligned { .. }
            | Self::Input { .. }
            | Self::Cuts { .. } => Status::Range,
            Self::NoEndpoint { .. } | Self::NoDomain { .. } => Status::NoEnt,
            Self::NotMemory { .. } => Status::Fault,
            Self::Domains { .. } | Self::Mappings { .. } | Self::Space(_) => Status::NoMem,
            Self::Attach { cause, .. } => attach(cause),
            Self::Map(cause) => map(cause),
            Self::Unmap(cause) => unmap(cause),
        }
    }
}

const fn map(cause: &MapError) -> Status {
    match cause {
        MapError::Range(_) | MapError::Part { .. } | MapError::BeyondEnd { .. } => Status::Range,
        MapError::Overlap { .. } | MapError::Reserved { .. } | MapError::Prot { .. } => {
            Status::Inval
        }
        MapError::TooMany { .. }
        | MapError::OverLimit(_)
        | MapError::NoMemory { .. }
        | MapError::NoRoom { .. } => Status::NoMem,
        MapError::Table(TableMapError::NoTables(_)) => Status::NoMem,
        MapError::Table(TableMapError::Range(_)) => Status::Range,
        MapError::Table(TableMapError::Overlap { .. } | TableMapError::Prot { .. }) => {
            Status::Inval
        }
        // The memory is where the tables cannot point to, or nowhere.
        MapError::Table(TableMapError::OutputTooWide { .. }) | MapError::Pin(_) => Status::Fault,
        MapError::Unsupported(_) => Status::Unsupp,
        _ => Status::DevErr,
    }
}

const fn unmap(cause: &UnmapError) -> Status {
    match cause {
        UnmapError::CutsArea { .. } | UnmapError::CutsMapping { .. } => Status::Range,
        _ => Status::DevErr,
    }
}

const fn attach(cause: &AttachError) -> Status {
    match cause {
        AttachError::NoDomain { .. }
        | AttachError::Reserved { .. }
        | AttachError::Conflict(_)
        | AttachError::Busy(_) => Status::Unsupp,
        AttachError::Build(_) => Status::NoMem,
        AttachError::Replay { cause, .. } => map(cause),
        _ => Status::DevErr,
    }
}

/// Failures that no answer to a request can report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failed {
    /// An endpoint that is to be in bypass mode is not: all its accesses fault.
    #[error("endpoint {endpoint} is not in bypass mode, as it is to be")]
    NoBypass {
        /// The endpoint.
        endpoint: u32,
        /// Cause.
        #[source]
        cause: RequestError,
    },
    /// An endpoint cannot be taken from where it is. The device goes on after a
    /// [reset](crate::VirtioIommu::reset) that can.
    #[error("endpoint {endpoint} still reaches memory that it must not reach")]
    Stuck {
        /// The endpoint.
        endpoint: u32,
        /// Cause.
        #[source]
        cause: DetachError,
    },
    /// The answer to a request cannot be written, so that the driver does not learn whether it was done.
    #[error("an answer, {status:?}, cannot be written")]
    Unanswered {
        /// The answer; [`Status::Ok`] when the request was done.
        status: Status,
    },
    /// Not everything of an address space without endpoints could be given back.
    #[error("the address space of domain {domain:?} cannot be closed")]
    NotClosed {
        /// The domain; `None` for that of bypass mode.
        domain: Option<u32>,
        /// Cause.
        #[source]
        cause: CloseError,
    },
    /// A region of the guest's memory is not where endpoints in bypass mode should have it.
    #[error("endpoints in bypass mode lack {region}")]
    NoRegion {
        /// Its guest addresses.
        region: Span<GuestAddr>,
        /// Cause.
        #[source]
        cause: MapError,
    },
    /// A region that is gone is still mapped for endpoints in bypass mode.
    #[error("endpoints in bypass mode still have {region}")]
    RegionLeft {
        /// Its guest addresses.
        region: Span<GuestAddr>,
        /// Cause.
        #[source]
        cause: UnmapError,
    },
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::io;

    use ioas::PinFailed;

    use super::*;

    /// Messages of an error and its causes, none of which has the next one within it.
    fn chain(error: &(dyn Error + 'static)) -> Vec<String> {
        let causes = core::iter::successors(Some(error), |&error| error.source());
        let said: Vec<_> = causes.map(ToString::to_string).collect();
        for pair in said.windows(2) {
            assert!(!pair[0].contains(&pair[1]), "{pair:?}");
        }
        said
    }

    #[test]
    fn each_cause_is_said_once_down_to_the_error_number() {
        let cause = io::Error::from_raw_os_error(12);
        let cause = AttachError::Replay {
            area: Span::new(0x1000, 0x1000),
            cause: MapError::Pin(PinFailed::Refused(Box::new(cause))),
        };
        let cause = RequestError::Attach { endpoint: 8, cause };
        let failed = Failed::NoBypass { endpoint: 8, cause };
        assert_eq!(chain(&failed).len(), 5);
        let last =
            std::iter::successors(Some(&failed as &dyn Error), |&error| error.source()).last();
        let number = last.and_then(|last| last.downcast_ref::<io::Error>()?.raw_os_error());
        assert_eq!(number, Some(12));
    }
}
