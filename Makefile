# make help lists the targets.

STATICCHECK = go tool -modfile=internal/tools/go.mod staticcheck

# Modules of their own: ./... does not reach them.
EXAMPLES = examples/tracing examples/asynq examples/postgres-rows
BENCH = bench

.PHONY: help test chaos lint quickstart bench bench-quick model

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: ## vet, and run all tests with the race detector; installs redis-server, PostgreSQL and gcc where they are missing
	./internal/tools/need.sh redis-server initdb gcc
	go vet ./...
	go test -race -shuffle=on ./...
	for module in $(EXAMPLES); do (cd $$module && go vet ./... && go test -race ./...) || exit 1; done

chaos: ## the long campaign of kills, failovers and simulated schedules, with a summary; an hour on two cores, PERCENT=1 is a minute
	./internal/tools/need.sh redis-server gcc
	./internal/tools/chaos.sh

# ST1005 wants error texts in lower case. Ours may begin with a name: Redis, Enqueuer.
lint: ## gofmt, vet, staticcheck
	@unformatted=$$(gofmt -l .) && if [ -n "$$unformatted" ]; then echo "gofmt -w these files:" $$unformatted; exit 1; fi
	go vet ./...
	for module in $(EXAMPLES) $(BENCH); do (cd $$module && go vet ./...) || exit 1; done
	$(STATICCHECK) -checks inherit,-ST1005 ./...

quickstart: ## kill a worker, and see its jobs recovered; needs no Redis
	go run ./examples/quickstart

bench: ## measure everything, and write docs/benchmarks.md and docs/benchmarks.svg; about 10 minutes
	./internal/tools/need.sh redis-server
	cd $(BENCH) && go run . -out ../docs

bench-quick: ## the same with fewer repeats, in under two minutes; writes nothing
	./internal/tools/need.sh redis-server
	cd $(BENCH) && go run . -quick

model: ## check the Promela model of the protocol with spin, and that it fails without each protection; some minutes
	./internal/tools/need.sh spin gcc
	./docs/model/check.sh
