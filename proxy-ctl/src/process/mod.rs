//! The running proxy, from its configuration to its end. [`run`] reads from top to bottom:
//!
//! 1. [`settings`] reads and checks the configuration, and the mode is chosen. Nothing is touched
//!    before.
//! 2. [`proxy`] starts the tasks: the servers answer, the [`source`] lists, and the
//!    [`dataplane_thread`] loads its programs.
//! 3. [`set_up`] sets up the node, in kube-proxy's order.
//! 4. Everything listed is written, and changes are followed. [`cleanup`] removes what
//!    another kube-proxy has left, and [`record`] writes down what `status` shows.
//! 5. The process ends by a signal, a failure, or a change of the [`own_node`] or of the
//!    configuration ([`reload`]) that needs a new process. What is programmed goes on working.

mod cleanup;
mod dataplane_thread;
mod event;
mod mode_choice;
mod own_node;
mod proxy;
pub mod record;
mod reload;
mod run;
mod set_up;
mod settings;
mod source;

pub use self::{record::Record, run::run, settings::Settings};
