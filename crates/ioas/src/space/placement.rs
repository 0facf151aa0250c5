//! Placement of page tables, and so their sharing by devices.
//!
//! A unit reads tables as it reads any memory: those on another memory node cost it more. If devices
//! of two nodes share a table, those of one node read it over the link between the nodes at every
//! miss. The policy is a value, and all that follows from it is decided here: [`Placement::joins`]
//! says which devices share, [`Placement::tables`] where shared tables lie. Neither
//! is stored with a domain; its node follows from the units that are attached.

use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use iommu::{DomainId, NodeId, Unit};

use crate::space::endpoint::EndpointId;

/// Nodes on which page tables lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// One table for all devices that can share one, on the node of the first.
    #[default]
    Shared,
    /// A table for the devices of each node, on that node. Memory is pinned and charged once all the
    /// same; tables and the time to fill them are spent for each node. Devices of which no node is
    /// known are a node of their own, whose table lies anywhere.
    PerNode,
    /// One table for all devices that can share one, on this node.
    Near(NodeId),
}

impl Placement {
    /// Returns true if a device of node `device` may share the table of devices of node `domain`.
    pub fn joins(self, domain: Option<NodeId>, device: Option<NodeId>) -> bool {
        match self {
            Self::Shared | Self::Near(_) => true,
            Self::PerNode => domain == device,
        }
    }

    /// Returns true if devices that could share a table may be kept from it.
    #[cfg(feature = "vfio")]
    pub(crate) fn divides(self) -> bool {
        !self.joins(None, Some(NodeId(0)))
    }

    /// Node of the table for devices of node `domain`; `None`: anywhere.
    pub fn tables(self, domain: Option<NodeId>) -> Option<NodeId> {
        match self {
            Self::Shared | Self::PerNode => domain,
            Self::Near(node) => Some(node),
        }
    }
}

/// `shared`, `per-node`, `near:1`: as command lines have it, and [`FromStr`] reads it.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shared => f.write_str("shared"),
            Self::PerNode => f.write_str("per-node"),
            Self::Near(node) => write!(f, "near:{node}"),
        }
    }
}

/// A word that names no [`Placement`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tables are placed `shared`, `per-node`, or `near:N` for a node N")]
pub struct NoPlacement;

impl FromStr for Placement {
    type Err = NoPlacement;

    fn from_str(word: &str) -> Result<Self, NoPlacement> {
        match word {
            "shared" => Ok(Self::Shared),
            "per-node" => Ok(Self::PerNode),
            _ => {
                let node = word
                    .strip_prefix("near:")
                    .and_then(|node| node.parse().ok());
                node.map(|node| Self::Near(NodeId(node))).ok_or(NoPlacement)
            }
        }
    }
}

/// A page table of an address space, and where it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Its number: that of the domain for tables of ours, of the page table for iommufd. `None`: the
    /// kernel has made it by itself.
    pub number: Option<u32>,
    /// The node of its endpoints: of the first of which one is known, by its unit or by the caller who
    /// attached it. It follows from what is attached, so it may change when an endpoint leaves.
    pub node: Option<NodeId>,
    /// Node that its tables were asked to lie on; `None`: anywhere.
    pub tables: Option<NodeId>,
    /// It keeps what devices write to.
    pub tracks: bool,
    /// Mappings that a kernel has, for all tables of one container or address space of iommufd with the
    /// first of them. 0 for tables of ours.
    pub mappings: u64,
    /// Bytes that the kernel charges for these mappings by itself; what is copied from other address
    /// spaces is charged there.
    pub charged: u64,
    /// Endpoints attached to it.
    pub endpoints: Vec<EndpointId>,
}

impl Place {
    /// The domain, where tables are ours.
    pub fn domain(&self) -> Option<DomainId> {
        self.number.map(DomainId)
    }
}

/// The node of a device behind `unit`: the unit's, which reads the tables; if that is not known, the
/// node `near` which the device itself is at.
pub(crate) fn home(unit: &dyn Unit, near: Option<NodeId>) -> Option<NodeId> {
    unit.node().or(near)
}
