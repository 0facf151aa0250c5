//! What other commands of this program measure for the lab.

use std::ops::ControlFlow;

use dmaspace::devices::{Places, Way};
use lab::bench::{Commands, DeviceMap, MapTimes, NoTimes, Walk};

use crate::map::{JobError, MapBackend, MapJob, Stage, Watch};
use crate::numa::Measurement;
use crate::numa::measure::{MeasureError, MeasureReport};
use crate::sentence;

/// This program.
pub(super) struct Program;

/// Whoever watches the bench watches the map.
struct Asked<'a>(&'a mut dyn FnMut() -> ControlFlow<()>);

impl Watch for Asked<'_> {
    fn progress(&mut self, _stage: Stage, _done: u64, _total: u64) -> ControlFlow<()> {
        (self.0)()
    }
}

impl Commands for Program {
    fn map(
        &self,
        map: &DeviceMap<'_>,
        on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<MapTimes, NoTimes> {
        let devices = vec![map.device.to_owned()];
        let job = MapJob {
            size: Some(map.bytes),
            backing: Some(map.backing),
            backend: match map.way {
                Way::Iommufd => MapBackend::Iommufd { devices },
                _ => MapBackend::Vfio { devices },
            },
            placement: None,
        };
        match job.run(&mut Asked(on)) {
            Ok(report) => Ok(MapTimes {
                map_ns: report.times.map_ns,
                unmap_ns: report.times.unmap_ns,
            }),
            Err(JobError::Interrupted) => Err(NoTimes::Interrupted),
            Err(error) => Err(NoTimes::Because(sentence(&error))),
        }
    }

    fn walks(&self) -> (Vec<Walk>, Option<String>) {
        let measured = Measurement::of_this_machine(&Places::default());
        walks(&measured.and_then(|measurement| measurement.run(&[])))
    }
}

/// The walks that were measured, and why there are none, or not all.
fn walks(found: &Result<MeasureReport, MeasureError>) -> (Vec<Walk>, Option<String>) {
    match found {
        Ok(found) => {
            let walks = found.walks.iter().map(|walks| Walk {
                near: walks.cpu_node == walks.table_node,
                median_ns: walks.memory.median_ns,
            });
            (walks.collect(), found.not_run.clone())
        }
        Err(error) => (Vec::new(), Some(error.to_string())),
    }
}
