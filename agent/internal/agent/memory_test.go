package agent_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/pkg/validation"
)

var writeWorst = flag.Bool("write-worst", false, "rewrite the table of the worst requests in docs/limits.md")

const mebibyte = 1 << 20

// bound is what the worst request of a method may cost, in MiB that are allocated in total, on both
// sides of the connection. Garbage that is collected meanwhile counts, so the memory in use at any
// time is less.
type bound struct {
	// request is the maximum size of a request in KiB.
	request int
	// legal is for requests that satisfy the constraints, illegal for all others.
	legal, illegal int
}

// bounds has the methods whose requests cost more than those of [otherwise].
var bounds = map[string]bound{
	"ClaimService/SyncClaims":                         {request: 4096, legal: 320, illegal: 64},
	"externalgrpc.CloudProvider/NodeGroupDeleteNodes": {request: 4096, legal: 64, illegal: 64},
	"ClaimService/CreateClaim":                        {request: 256, legal: 32, illegal: 8},
	"externalgrpc.CloudProvider/PricingPodPrice":      {request: 256, legal: 32, illegal: 8},

	"StatusService/GetStatus":     open,
	"grpc.health.v1.Health/Check": open, "grpc.health.v1.Health/List": open, "grpc.health.v1.Health/Watch": open,
	"grpc.reflection.v1.ServerReflection/ServerReflectionInfo":      open,
	"grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": open,
}

// open is for the methods that every caller may call.
var open = bound{request: 4, legal: 8, illegal: 8}

var otherwise = bound{request: 256, legal: 8, illegal: 8}

func boundOf(of rpc) bound {
	if b, listed := bounds[strings.Split(of.name(), ",")[0]]; listed {
		return b
	}
	return otherwise
}

// TestMemoryOfTheWorstRequests sends the worst requests to every method that the agent serves,
// according to its reflection, and bounds what each of them allocates. docs/limits.md has the
// bounds.
func TestMemoryOfTheWorstRequests(t *testing.T) {
	target := newTarget(t)
	validator, err := validation.New()
	require.NoError(t, err)
	var measured []string
	for _, of := range target.calls(t) {
		name, _, _ := strings.Cut(of.name(), ",")
		if slices.Contains(measured, name) {
			continue // with another holder
		}
		measured = append(measured, name)
		t.Run(name, func(t *testing.T) {
			b := boundOf(of)
			w := worst{tb: t, of: of, namespace: target.namespace, most: b.request << 10, validator: validator}
			legal, illegal := w.legal(), w.illegal()
			if further := more[of.method.FullName()]; further != nil {
				furtherLegal, furtherIllegal := further(t, w.most)
				legal, illegal = append(legal, furtherLegal...), append(illegal, furtherIllegal...)
			}
			for kind, c := range map[string]struct {
				attacks []attack
				most    int
			}{"legal": {legal, b.legal}, "illegal": {illegal, b.illegal}} {
				highest, by := 0.0, ""
				for _, a := range c.attacks {
					cost := target.cost(t, of, a, float64(c.most))
					require.LessOrEqual(t, cost, float64(c.most), "MiB for the %s request %q of %d bytes", kind, a.name, len(a.request))
					if cost > highest {
						highest, by = cost, a.name
					}
				}
				t.Logf("%s: %d requests cost at most %.1f of %d MiB (%s)", kind, len(c.attacks), highest, c.most, by)
			}
		})
	}
	require.Len(t, measured, len(requests), "every method is measured")
	table := worstTable(target.calls(t))
	page, err := os.ReadFile(limitsPage)
	require.NoError(t, err)
	before, rest, found := strings.Cut(string(page), worstBegins)
	require.True(t, found)
	_, after, found := strings.Cut(rest, worstEnds)
	require.True(t, found)
	wanted := before + worstBegins + table + worstEnds + after
	if *writeWorst {
		require.NoError(t, os.WriteFile(limitsPage, []byte(wanted), 0o600))
		return
	}
	require.Equal(t, wanted, string(page), "docs/limits.md is not current: run the test with -args -write-worst")
}

var limitsPage = filepath.Join("..", "..", "..", "docs", "limits.md")

const worstBegins, worstEnds = "<!-- worst requests -->\n", "<!-- end of worst requests -->\n"

// cost returns how many MiB a request allocates. What the agent does in the background counts too,
// so that a cost above the bound is measured again.
func (t *target) cost(test *testing.T, of rpc, a attack, most float64) float64 { //nolint:thelper // t is the target
	test.Helper()
	const tries = 3
	least := 0.0
	for try := range tries {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		answer, err := of.send(test, t.caller(of), a.request)
		runtime.ReadMemStats(&after)
		// It is unavailable for candidates that the agent has not seen yet.
		require.Contains(test, append(slices.Clip(answerable), codes.Unavailable), status.Code(err), "%s: %v", a.name, err)
		// The answer may name every claim that the request names.
		require.LessOrEqual(test, len(answer), maxFuzzedAnswer+len(a.request), a.name)
		require.LessOrEqual(test, proto.Size(status.Convert(err).Proto()), maxFuzzedStatus, a.name)
		cost := float64(after.TotalAlloc-before.TotalAlloc) / mebibyte
		if try == 0 || cost < least {
			least = cost
		}
		if least <= most {
			break
		}
	}
	return least
}

func worstTable(calls []rpc) string {
	var text strings.Builder
	text.WriteString("| method | request, at most | worst legal request | worst illegal request |\n|---|---|---|---|\n")
	var shown []string
	for _, of := range calls {
		name, _, _ := strings.Cut(of.name(), ",")
		if slices.Contains(shown, name) {
			continue
		}
		shown = append(shown, name)
		b := boundOf(of)
		size := fmt.Sprintf("%d KiB", b.request)
		if b.request >= 1024 {
			size = fmt.Sprintf("%d MiB", b.request/1024)
		}
		fmt.Fprintf(&text, "| %s | %s | %d MiB | %d MiB |\n", name, size, b.legal, b.illegal)
	}
	return text.String()
}
