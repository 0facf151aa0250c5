//! The progress bar, and the way by which a signal reaches the job.
//!
//! The bar appears on stderr when the job is half a second old and stderr is a terminal, names the
//! stage, and leaves no trace when it ends.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::draw::terminal::progress_chars;
use crate::map::{Stage, Watch};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::stop::Stop;

/// How long the job must have been going before the bar is worth looking at.
const PATIENCE: Duration = Duration::from_millis(500);

/// Watches one job.
pub(crate) struct Progress {
    stop: Stop,
    begun: Instant,
    stage: Option<Stage>,
    bar: Bar,
}

enum Bar {
    /// Nobody would see it, or it would disturb what else is written there.
    Never,
    /// The job is young.
    NotYet,
    Shown(ProgressBar),
}

impl Progress {
    /// With a bar if `bar` holds.
    pub(crate) fn new(stop: Stop, bar: bool) -> Self {
        Self {
            stop,
            begun: Instant::now(),
            stage: None,
            bar: if bar { Bar::NotYet } else { Bar::Never },
        }
    }
}

impl Watch for Progress {
    fn progress(&mut self, stage: Stage, done: u64, total: u64) -> ControlFlow<()> {
        if self.stop.is_asked() {
            return ControlFlow::Break(());
        }
        let next = self.stage != Some(stage);
        self.stage = Some(stage);
        if next {
            tracing::debug!(total_bytes = total, "{}", name(stage));
        }
        match &self.bar {
            Bar::NotYet if self.begun.elapsed() >= PATIENCE => {
                self.bar = Bar::Shown(new_bar(stage, done, total));
            }
            Bar::Shown(bar) => {
                if next {
                    bar.set_message(name(stage));
                    bar.set_length(total);
                }
                bar.set_position(done);
            }
            Bar::Never | Bar::NotYet => {}
        }
        ControlFlow::Continue(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Bar::Shown(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn new_bar(stage: Stage, done: u64, total: u64) -> ProgressBar {
    let template = "{msg:<10} {wide_bar:.cyan} {binary_bytes:>11} of {binary_total_bytes}";
    let style = ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars(progress_chars());
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr())
        .with_style(style)
        .with_message(name(stage))
        .with_position(done);
    // One call into the kernel can take longer than a person's trust.
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// The stage as the report calls it, too.
fn name(stage: Stage) -> &'static str {
    match stage {
        Stage::Populate => "populate",
        Stage::Pin => "pin",
        Stage::FindRuns => "find runs",
        Stage::Map => "map",
        Stage::Attach => "attach",
        Stage::DmaCheck => "DMA check",
        Stage::Unmap => "unmap",
        Stage::Unpin => "unpin",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_goes_on_until_it_is_asked_to_stop() {
        let mut progress = Progress::new(Stop::for_tests(false), true);
        assert!(progress.progress(Stage::Pin, 1, 2).is_continue());
        assert!(matches!(progress.bar, Bar::NotYet));
        let mut progress = Progress::new(Stop::for_tests(true), true);
        assert!(progress.progress(Stage::Pin, 1, 2).is_break());
    }

    #[test]
    fn the_bar_comes_after_half_a_second_and_only_where_it_is_seen() {
        for seen in [false, true] {
            let mut progress = Progress::new(Stop::for_tests(false), seen);
            progress.begun -= PATIENCE;
            assert!(progress.progress(Stage::Map, 0, 0).is_continue());
            assert!(progress.progress(Stage::Map, 9, 5).is_continue());
            assert!(progress.progress(Stage::Unmap, 1, 5).is_continue());
            assert_eq!(matches!(progress.bar, Bar::Shown(_)), seen);
        }
    }
}
