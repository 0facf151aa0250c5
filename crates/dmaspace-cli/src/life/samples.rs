//! A life for tests of what it looks like.

use std::time::Duration;

use crate::life::{
    Band, BandState, LifeMemory, LifeReport, LifeStep, Moment, PartReport, RootReport, StepReport,
};
use crate::map::NodeShare;

/// Two steps, with everything in the picture.
pub(crate) fn small() -> LifeReport {
    let nodes = vec![NodeShare {
        node: Some(0),
        bytes: 1 << 20,
    }];
    let step = |step, checked: &str, found: &str| StepReport {
        step,
        took: Duration::from_nanos(1_234_567),
        runs: 2,
        bytes: 2 << 20,
        tables: 12,
        flushes: 2,
        checked: checked.into(),
        found: found.into(),
        refused: None,
        right: true,
    };
    let states = [
        BandState::Mapped { leaf_bytes: 4096 },
        BandState::Mapped {
            leaf_bytes: 1 << 20,
        },
        BandState::Hole,
        BandState::Balloon,
        BandState::Dirty,
        BandState::Absent,
    ];
    let bands = |iova| -> Vec<Band> {
        let at = (0u64..).zip(states);
        at.map(|(nth, state)| Band {
            iova: iova + nth * (256 << 10),
            len_bytes: 256 << 10,
            state,
        })
        .collect()
    };
    let part = |node| PartReport {
        node,
        size_bytes: 1 << 20,
        nodes: nodes.clone(),
    };
    let root = |node, format: &str| RootReport {
        node,
        nodes: nodes.clone(),
        format: format.into(),
        device: format!("0{}:00.0", node + 1),
    };
    LifeReport {
        backend: "software".into(),
        devices: Vec::new(),
        memory: LifeMemory {
            size_bytes: 2 << 20,
            size_reason: Some("the default".into()),
            backing: "memfd".into(),
            addresses: "file-offset".into(),
            iova: 1 << 40,
            parts: vec![part(0), part(1)],
            second_node_planned: true,
            pin: "io_uring".into(),
            counter: "mm->pinned_vm".into(),
        },
        roots: vec![root(0, "vtd-ss"), root(1, "amdv1")],
        largest_leaf_bytes: 1 << 20,
        steps: vec![
            step(
                LifeStep::Memory,
                "one node here: the second planned",
                "node 1 planned",
            ),
            step(
                LifeStep::Hole,
                "out of a leaf of 1 MiB; now 12 leaves",
                "12 leaves",
            ),
        ],
        moments: vec![
            Moment {
                after: LifeStep::Memory,
                roots: Vec::new(),
            },
            Moment {
                after: LifeStep::Hole,
                roots: vec![bands(1 << 40), bands(1 << 40)],
            },
        ],
        ..LifeReport::default()
    }
}
