package agent_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/samber/lo"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/agent"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/options"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/server"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/testpki"
	"github.com/karpenter-capi/karpenter-capi/pkg/client"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

var (
	herdSpokes   = flag.Int("spokes", 6, "how many spokes lose their agent at the same moment")
	herdMachines = flag.Int("herd-machines", 120, "how many Machines with claims they have together")
)

// requestsOfStart and requestsOfSpoke bound what an agent requests of the hub when it starts, for
// its discovery, caches and probes, and when a spoke comes back. They were 21, and 7 for each of 6,
// 30 and 1,000 spokes.
const (
	requestsOfStart = 40
	requestsOfSpoke = 8
)

// servingProcess is the environment variable with the address at which a process of this test
// binary serves as an agent until it is killed.
const servingProcess = "AGENT_TEST_SERVES"

// runServingProcess is that process. It serves its metrics at the second address.
func runServingProcess(address, metricsAddress, namespace, kubeconfig, folder string) error {
	ctx := context.Background()
	hub, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	o := testOptions(namespace)
	o.KubeAPIQPS, o.KubeAPIBurst = options.New().KubeAPIQPS, options.New().KubeAPIBurst
	o.MetricsBindAddress, o.MetricsSecure = metricsAddress, false
	a, err := agent.New(ctx, agent.Config{Options: o, Hub: hub, Registerer: metrics.Registry})
	if err != nil {
		return err
	}
	listener, _, err := server.ListenTLS(ctx, address, server.TLSFiles{
		CertFile: filepath.Join(folder, "tls.crt"), KeyFile: filepath.Join(folder, "tls.key"), ClientCAFile: filepath.Join(folder, "ca.crt"),
	})
	if err != nil {
		return err
	}
	return a.Run(ctx, listener)
}

// site is an agent in its own process, at a fixed address.
type site struct {
	t                            *testing.T
	address, metrics             string
	namespace, kubeconfig, files string
	process                      *exec.Cmd
}

func (s *site) start() {
	s.t.Helper()
	s.process = exec.Command(os.Args[0], s.address, s.metrics, s.namespace, s.kubeconfig, s.files)
	s.process.Env = append(os.Environ(), servingProcess+"=1")
	s.process.Stderr = s.t.Output()
	require.NoError(s.t, s.process.Start())
}

// kill kills the process with SIGKILL.
func (s *site) kill() {
	if s.process != nil {
		_ = s.process.Process.Kill()
		_ = s.process.Wait()
	}
	s.process = nil
}

var requestLines = regexp.MustCompile(`(?m)^rest_client_requests_total\{.*\} (\d+)$`)

// requests returns how many requests the agent has sent to the hub.
func (s *site) requests() int {
	s.t.Helper()
	response, err := http.Get("http://" + s.metrics + "/metrics")
	require.NoError(s.t, err)
	defer func() { _ = response.Body.Close() }()
	content, err := io.ReadAll(response.Body)
	require.NoError(s.t, err)
	return lo.SumBy(requestLines.FindAllStringSubmatch(string(content), -1), func(line []string) int { return lo.Must(strconv.Atoi(line[1])) })
}

// returning calls the agent like a shim: it watches node groups and claims, and sends its live set
// after each reconnect.
type returning struct {
	client  *client.Client
	cluster *agentv1alpha1.ClusterRef
	groups  *client.Mirror[*agentv1alpha1.NodeGroup]
	claims  *client.Mirror[*agentv1alpha1.Claim]

	mu      sync.Mutex
	synced  time.Time
	refused map[codes.Code]int
}

func (c *returning) sync(ctx context.Context) error {
	listed, err := c.client.Claims.ListClaims(ctx, &agentv1alpha1.ListClaimsRequest{Cluster: c.cluster, Holder: "karpenter"})
	if err != nil {
		return err
	}
	_, err = c.client.Claims.SyncClaims(ctx, &agentv1alpha1.SyncClaimsRequest{
		Cluster: c.cluster, Holder: "karpenter", Token: listed.GetToken(), SpokeId: recordedSpoke,
		LiveClaimIds: lo.Map(listed.GetClaims(), func(claim *agentv1alpha1.Claim, _ int) string { return claim.GetClaimId() }),
	})
	return err
}

// follow sends the live set each time that the views follow an agent again. It retries with the
// shim's backoff until the agent accepts it.
func (c *returning) follow(ctx context.Context) {
	changes, stop := c.claims.StateChanges()
	defer stop()
	var of time.Time
	for {
		if state := c.claims.State(); state.Connected && state.Since != of {
			of = state.Since
			// These are the values of controller-runtime.
			backoff := wait.Backoff{Duration: 5 * time.Millisecond, Factor: 2, Steps: 20, Cap: time.Minute}
			for ctx.Err() == nil {
				err := c.sync(ctx)
				if err == nil {
					c.mu.Lock()
					c.synced = time.Now()
					c.mu.Unlock()
					break
				}
				c.mu.Lock()
				c.refused[status.Code(err)]++
				c.mu.Unlock()
				select {
				case <-ctx.Done():
				case <-time.After(backoff.Step()):
				}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changes:
		}
	}
}

// TestManySpokesComeBackAtOnce kills an agent that many spokes follow, and starts another in its
// place. It logs how long it takes until all spokes follow the new agent and have sent their live
// sets, the rejected calls, and the number of requests to the hub. It fails if a spoke is left out,
// if an object in the hub changes, or if the agent makes more requests than its start and each
// spoke may cost.
func TestManySpokesComeBackAtOnce(t *testing.T) {
	namespace := plane.Namespace(t)
	perSpoke := max(1, *herdMachines / *herdSpokes)
	herd(t, namespace, *herdSpokes, perSpoke)
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(kubeconfig, plane.KubeConfig(), 0o600))
	authority, folder := testpki.New(t), t.TempDir()
	authority.Issue(t, folder, authority)
	s := &site{t: t, address: freeAddress(t), metrics: freeAddress(t), namespace: namespace, kubeconfig: kubeconfig, files: folder}
	s.start()
	t.Cleanup(s.kill)

	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { stop(); running.Wait() })
	callers := make([]*returning, *herdSpokes)
	for i := range callers {
		cluster := clusterName(i)
		files := authority.Issue(t, t.TempDir(), authority, "spiffe://karpenter-capi/cluster/"+namespace+"/"+cluster)
		c, err := client.New(client.Options{
			Address: s.address, TLS: &client.TLS{CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile, Refresh: time.Hour},
		})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		ref := &agentv1alpha1.ClusterRef{Namespace: namespace, Name: cluster}
		callers[i] = &returning{
			client: c, cluster: ref, groups: c.MirrorNodeGroups(ref), claims: c.MirrorClaims(ref, "karpenter"), refused: map[codes.Code]int{},
		}
		running.Go(func() { _ = callers[i].groups.Run(ctx) })
		running.Go(func() { _ = callers[i].claims.Run(ctx) })
		running.Go(func() { callers[i].follow(ctx) })
	}
	all := func(since time.Time) func(context.Context) (bool, error) {
		return func(context.Context) (bool, error) {
			return lo.EveryBy(callers, func(c *returning) bool {
				c.mu.Lock()
				defer c.mu.Unlock()
				return c.synced.After(since) && c.groups.State().Connected && c.claims.State().Connected && held(c.claims) == perSpoke
			}), nil
		}
	}
	within := 5 * time.Minute
	require.NoError(t, wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, within, true, all(time.Time{})), "the first time")
	for _, c := range callers {
		c.mu.Lock()
		clear(c.refused)
		c.mu.Unlock()
	}
	before := versions(t, namespace)

	s.kill()
	killed := time.Now()
	s.start()
	require.NoError(t, wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, within, true, all(killed)), "after the agent was killed")
	back := lo.Map(callers, func(c *returning, _ int) time.Duration { return c.synced.Sub(killed) })
	refused := map[codes.Code]int{}
	for _, c := range callers {
		c.mu.Lock()
		for code, n := range c.refused {
			refused[code] += n
		}
		c.mu.Unlock()
	}
	requests := s.requests()
	t.Logf("%d spokes with %d Machines in all: all back after %s, %s; the agent made %d requests to the hub; refused or failed: %s",
		len(callers), len(callers)*perSpoke, lo.Max(back).Round(time.Millisecond), spread(back), requests, byCode(refused))
	// A refused call is repeated, and may have cost requests before it was refused.
	assert.LessOrEqual(t, requests, requestsOfStart+(len(callers)+lo.Sum(lo.Values(refused)))*requestsOfSpoke,
		"the number of Machines does not count, nor does the number of spokes twice")
	assert.Equal(t, before, versions(t, namespace), "nothing has changed in the hub")
}

func byCode(counts map[codes.Code]int) string {
	if len(counts) == 0 {
		return "none"
	}
	parts := lo.MapToSlice(counts, func(code codes.Code, n int) string { return fmt.Sprintf("%d %s", n, code) })
	return strings.Join(parts, ", ")
}

// herd creates Clusters, each with the given number of running Machines with claims.
func herd(t *testing.T, namespace string, clusters, machines int) {
	t.Helper()
	for number := range clusters {
		cluster, md, set := makeGroup(t, namespace, number, machines)
		var writes errgroup.Group
		writes.SetLimit(32)
		for i := range machines {
			writes.Go(func() error {
				machine := machineOf(set, i)
				err := runMachine(t.Context(), machine)
				if err == nil {
					_, err = madeClaim(t.Context(), cluster, md, machine, i, false)
				}
				return err
			})
		}
		require.NoError(t, writes.Wait())
	}
}

func held(claims *client.Mirror[*agentv1alpha1.Claim]) int {
	all, _ := claims.List()
	return len(all)
}
