//! Measures the model at 10,000 Services with 10 endpoints each. The aims on two cores are a full
//! build in less than 200 ms and a change of one endpoint in less than 1 ms. `tests/model_scale.rs`
//! limits its memory.

#![expect(clippy::expect_used, reason = "a benchmark has no caller to answer to")]

#[path = "support/cluster.rs"]
mod cluster;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use proxy_ctl::model::{Model, objects::EndpointSlice};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

const SERVICES: u32 = 10_000;
const ENDPOINTS: u32 = 10;

fn slices() -> Vec<EndpointSlice> {
    (0..SERVICES).map(|number| cluster::slice(number, ENDPOINTS)).collect()
}

fn built() -> Model {
    let mut model = Model::new(cluster::NODE);
    for number in 0..SERVICES {
        model.apply_service(cluster::service(number));
        model.apply_slice(cluster::slice(number, ENDPOINTS));
    }
    model.take_changes();
    model
}

fn full_build(criterion: &mut Criterion) {
    let services = || (0..SERVICES).map(cluster::service).collect();
    criterion.bench_function("full build", |bencher| {
        bencher.iter_batched(
            || (services(), slices()),
            |(services, slices)| {
                let mut model = Model::new(cluster::NODE);
                model.replace_services(services);
                model.replace_slices(slices);
                let changes = model.take_changes();
                (model, changes)
            },
            BatchSize::PerIteration,
        );
    });
}

fn changes(criterion: &mut Criterion) {
    let mut model = built();
    let slice = cluster::slice(5_000, ENDPOINTS);
    let mut scaled = slice.clone();
    scaled.endpoints.push(cluster::endpoint(SERVICES * ENDPOINTS));
    let mut versions = [scaled, slice].into_iter().cycle();
    criterion.bench_function("one endpoint change", |bencher| {
        bencher.iter_batched(
            || versions.next().expect("endless"),
            |slice| {
                model.apply_slice(slice);
                let changes = model.take_changes();
                assert_eq!(changes.changed.len(), 1);
                changes
            },
            BatchSize::SmallInput,
        );
    });
    criterion.bench_function("relist of all slices without a change", |bencher| {
        bencher.iter_batched(slices, |slices| model.replace_slices(slices), BatchSize::PerIteration);
    });
    criterion.bench_function("the whole desired state", |bencher| bencher.iter(|| model.desired()));
}

criterion_group! {
    name = model;
    config = Criterion::default().sample_size(20);
    targets = full_build, changes
}
criterion_main!(model);
