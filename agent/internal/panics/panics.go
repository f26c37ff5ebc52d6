// Package panics turns panics into errors. The process serves all Clusters, so a panic on one
// object or call must not affect any other. Each panic is logged and counted. Its stack, which may
// be long, is logged as well, once a minute for each place that panics.
//
// Reconcilers do not need it: controller-runtime does the same for them.
package panics

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
)

var total = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "capi_agent_panics_total",
	Help: "Panics because of a bug, by what each was confined to (call: a call or a stream; connection; object: of the hub; metrics: of one part of " +
		"the agent). The log contains the stack trace, once a minute for each place. " +
		"Panics of node groups' steps and of controllers are counted elsewhere.",
}, []string{"confined_to"})

// These count the panics that were confined to one call or stream, one connection, one object of
// the hub, and the metrics of one part of the agent.
var (
	Calls       = total.WithLabelValues("call")
	Connections = total.WithLabelValues("connection")
	Objects     = total.WithLabelValues("object")
	Metrics     = total.WithLabelValues("metrics")
)

func init() { //nolint:gochecknoinits // the metrics registry is a global of controller-runtime's
	metrics.Registry.MustRegister(total)
}

// Error is the error of work that panicked. The stack is in the log. Callers must not see its text,
// which may contain anything.
type Error struct{ Value any }

func (e *Error) Error() string {
	return fmt.Sprintf("an internal error of the agent, please report it: panic: %v", e.Value)
}

// Confined runs do, and returns an [*Error] if it panics. The message says what the panic costs. do
// must leave no lock held then.
func Confined(log logr.Logger, counter prometheus.Counter, message string, do func() error, keysAndValues ...any) (err error) {
	defer func() {
		if value := recover(); value != nil {
			err = Note(log, counter, message, value, keysAndValues...)
		}
	}()
	return do()
}

// place identifies a kind of panic: where in the code it occurred, and what it cost.
type place struct {
	message string
	at      uintptr
}

// stacks has a [*rate.Sometimes] for each place: callers that have found a bug may cause thousands
// of panics a second.
var stacks sync.Map

// stacksInterval is how often the stack of the panics of a place is logged.
const stacksInterval = time.Minute

// Note is for a function that has recovered a panic itself. The function that was deferred must
// call it, or else the stack is lost. There must be few messages.
func Note(log logr.Logger, counter prometheus.Counter, message string, value any, keysAndValues ...any) *Error {
	err := &Error{Value: value}
	counter.Inc()
	sometimes, _ := stacks.LoadOrStore(place{message, panickedAt()}, &rate.Sometimes{Interval: stacksInterval})
	sometimes.(*rate.Sometimes).Do(func() { //nolint:forcetypeassert // of no other type
		keysAndValues = append(keysAndValues, "stack", string(debug.Stack()))
	})
	log.Error(err, message, keysAndValues...)
	return err
}

// panickedAt returns the program counter of the function that has panicked, or 0 if it is not
// known.
func panickedAt() uintptr {
	var counters [32]uintptr
	frames := runtime.CallersFrames(counters[:runtime.Callers(1, counters[:])])
	panicking := false
	for {
		frame, more := frames.Next()
		switch inRuntime := strings.HasPrefix(frame.Function, "runtime."); {
		case panicking && !inRuntime:
			return frame.PC
		case frame.Function == "runtime.gopanic":
			panicking = true
		}
		if !more {
			return 0
		}
	}
}

// Collector returns a collector of metrics that may panic: a registry calls each collector in a
// goroutine of its own. Metrics that it has collected before are shown.
func Collector(log logr.Logger, collector prometheus.Collector) prometheus.Collector {
	return confined{collector, log}
}

type confined struct {
	prometheus.Collector

	log logr.Logger
}

// Collect implements [prometheus.Collector].
func (c confined) Collect(into chan<- prometheus.Metric) {
	_ = Confined(c.log, Metrics, "metrics are missing because of a bug in the agent", func() error {
		c.Collector.Collect(into)
		return nil
	}, "collector", fmt.Sprintf("%T", c.Collector))
}
