// Command dashboards makes pictures of the charts' Grafana dashboards: it runs the demo's scenario
// in a sandbox of its own with two agents, and some mishaps after it, records the metrics of agents
// and shim meanwhile, and plots the panels' queries.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox"
	"github.com/karpenter-capi/karpenter-capi/test/dashboards"
	"github.com/karpenter-capi/karpenter-capi/test/scenario"
	"github.com/karpenter-capi/karpenter-capi/test/testenv"
)

// startWithin bounds the start of the sandbox.
const startWithin = 5 * time.Minute

// tail is how long the metrics are recorded after the scenario.
const tail = 20 * time.Second

func main() {
	out := flag.String("out", "docs/images", "`Folder` to which the pictures are written.")
	name := flag.String("name", "dashboards", "`Name` of the sandbox.")
	flag.Parse()
	ctrl.SetLogger(logr.Discard())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	began := time.Now()
	pictures, err := run(ctx, *name, *out)
	if err != nil {
		fmt.Printf("dashboards: FAIL %v\n", err)
		stop()
		os.Exit(1) //nolint:gocritic // nothing but stop is deferred
	}
	fmt.Printf("dashboards: PASS pictures=%d seconds=%.0f\n", pictures, time.Since(began).Seconds())
}

func run(ctx context.Context, name, out string) (pictures int, err error) {
	all, err := dashboards.Read(".")
	if err != nil {
		return 0, err
	}
	starting, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	w, err := testenv.Start(starting, sandbox.Options{Name: name, Agents: 2}, nil)
	if err != nil {
		return 0, err
	}
	defer w.Stop()
	recording := dashboards.NewRecording()
	if err := record(ctx, w, recording); err != nil {
		return 0, err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return 0, err
	}
	var errs []error
	for _, d := range all { // all are drawn, so that an empty panel can be looked at
		errs = append(errs, picture(ctx, recording, d, filepath.Join(out, d.Name+".png")))
	}
	if err := errors.Join(errs...); err != nil {
		return len(all), err
	}
	digests, err := dashboards.Digests(all)
	if err != nil {
		return len(all), err
	}
	return len(all), os.WriteFile(filepath.Join(out, dashboards.DigestsFile), []byte(digests), 0o644)
}

// record records the metrics of agents and shim while the scenario runs and the mishaps happen.
func record(ctx context.Context, w *testenv.Env, recording *dashboards.Recording) error {
	sources := []dashboards.Source{{Pod: sandbox.Shim, Job: "karpenter", URL: func() string { return w.Sandbox.State().ShimMetrics }}}
	for name := range w.Sandbox.State().MetricsOfAgents {
		sources = append(sources, dashboards.Source{Pod: name, Job: "capi-agent", URL: func() string { return w.Sandbox.State().MetricsOfAgents[name] }})
	}
	recorded := make(chan error, 1)
	recordingFor, stop := context.WithCancel(ctx)
	go func() { recorded <- recording.Record(recordingFor, sources...) }()
	_, err := scenario.Run(ctx, w, scenario.Options{
		Title: func(format string, args ...any) { fmt.Printf("dashboards: "+format+"\n", args...) },
		Note:  func(string, ...any) {},
	})
	if err == nil {
		fmt.Println("dashboards: a mistyped price, no capacity, a caller without a certificate, and a hub that hangs")
		err = mishaps(ctx, w)
	}
	if err == nil {
		select {
		case <-ctx.Done():
			err = ctx.Err()
		case <-time.After(tail):
		}
	}
	stop()
	return errors.Join(err, <-recorded)
}

// picture draws a dashboard. It fails if a panel is empty, or shows only zeros, that should not.
func picture(ctx context.Context, recording *dashboards.Recording, d dashboards.Dashboard, file string) error {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	empty, zero, err := recording.Draw(ctx, d, out)
	if err := errors.Join(err, out.Close()); err != nil {
		return err
	}
	fmt.Printf("dashboards: %s, %d panels; nothing happened in: %s\n", file, len(d.Panels), strings.Join(append(empty, zero...), ", "))
	return d.Missing(empty, zero)
}
