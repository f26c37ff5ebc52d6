package kubeconfig

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const patience = 30 * time.Second

// apiServer answers requests for its version, and accepts one caller at a time.
type apiServer struct {
	*httptest.Server

	mu     sync.Mutex
	caller string // the common name of its client certificate, or its token
	seen   map[string]int
	paths  []string
}

func newAPIServer(t *testing.T, clients *x509.CertPool) *apiServer {
	t.Helper()
	s := &apiServer{seen: map[string]int{}}
	s.Server = httptest.NewUnstartedServer(s)
	s.TLS = &tls.Config{MinVersion: tls.VersionTLS12, ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: clients}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	caller := r.Header.Get("Authorization")
	if certificates := r.TLS.PeerCertificates; len(certificates) > 0 {
		caller = certificates[0].Subject.CommonName
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if caller != s.caller {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	s.seen[caller]++
	s.paths = append(s.paths, r.URL.Path)
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write([]byte(`{"gitVersion":"v1.36.0"}`))
}

// knows makes caller the only accepted caller.
func (s *apiServer) knows(caller string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.caller = caller
}

func (s *apiServer) kubeconfig(user clientcmdapi.AuthInfo) clientcmdapi.Config {
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	return clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"spoke": {Server: s.URL, CertificateAuthorityData: authority}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"shim": &user},
		Contexts:       map[string]*clientcmdapi.Context{"spoke": {Cluster: "spoke", AuthInfo: "shim"}},
		CurrentContext: "spoke",
	}
}

// put replaces a file atomically, as the kubelet replaces a secret's files.
func put(t *testing.T, path string, config clientcmdapi.Config) {
	t.Helper()
	content, err := clientcmd.Write(config)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path+".new", content, 0o600))
	require.NoError(t, os.Rename(path+".new", path))
}

type signer struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return key
}

func newSigner(t *testing.T) signer {
	t.Helper()
	key := newKey(t)
	certificate, err := cert.NewSelfSignedCACert(cert.Config{CommonName: "clients"}, key)
	require.NoError(t, err)
	return signer{certificate: certificate, key: key}
}

func (s signer) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(s.certificate)
	return pool
}

func (s signer) user(t *testing.T, name string) clientcmdapi.AuthInfo {
	t.Helper()
	key := newKey(t)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotBefore: s.certificate.NotBefore, NotAfter: s.certificate.NotAfter,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, s.certificate, key.Public(), s.key)
	require.NoError(t, err)
	encoded, err := keyutil.MarshalPrivateKeyToPEM(key)
	require.NoError(t, err)
	return clientcmdapi.AuthInfo{
		ClientCertificateData: pem.EncodeToMemory(&pem.Block{Type: cert.CertificateBlockType, Bytes: der}), ClientKeyData: encoded,
	}
}

func token(name string) clientcmdapi.AuthInfo { return clientcmdapi.AuthInfo{Token: name} }

// follow opens the file and follows it with a fake clock.
func follow(t *testing.T, path string) (kube kubernetes.Interface, step func(), logged func() []string) {
	t.Helper()
	clk := clocktesting.NewFakeClock(time.Now())
	f, err := Open(path, clk)
	require.NoError(t, err)
	var (
		mu    sync.Mutex
		lines []string
	)
	logger := funcr.New(func(_, args string) {
		mu.Lock()
		defer mu.Unlock()
		lines = append(lines, args)
	}, funcr.Options{})
	ctx, cancel := context.WithCancel(log.IntoContext(t.Context(), logger))
	ended := make(chan struct{})
	go func() { defer close(ended); f.Follow(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	require.Eventually(t, clk.HasWaiters, patience, time.Millisecond)
	config := f.Config()
	config.QPS = -1
	kube, err = kubernetes.NewForConfig(config)
	require.NoError(t, err)
	return kube, func() { clk.Step(refresh) }, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string(nil), lines...)
	}
}

func TestCredentialsAreRotatedThirtyTimes(t *testing.T) {
	clients := newSigner(t)
	for kind, user := range map[string]func(t *testing.T, name string) (clientcmdapi.AuthInfo, string){
		"token": func(_ *testing.T, name string) (clientcmdapi.AuthInfo, string) { return token(name), "Bearer " + name },
		"client certificate": func(t *testing.T, name string) (clientcmdapi.AuthInfo, string) {
			t.Helper()
			return clients.user(t, name), name
		},
	} {
		t.Run(kind, func(t *testing.T) {
			server := newAPIServer(t, clients.pool())
			path := filepath.Join(t.TempDir(), "value")
			first, caller := user(t, "caller-0")
			put(t, path, server.kubeconfig(first))
			server.knows(caller)
			kube, step, logged := follow(t, path)
			for i := range 30 {
				next, caller := user(t, fmt.Sprintf("caller-%d", i+1))
				put(t, path, server.kubeconfig(next))
				step()
				require.Eventually(t, func() bool { return len(logged()) == i+1 }, patience, time.Millisecond)
				server.knows(caller) // the previous caller is no longer accepted, not even on open connections
				_, err := kube.Discovery().ServerVersion()
				require.NoError(t, err)
			}
			assert.Len(t, server.seen, 30)
		})
	}
}

func TestAnotherServerIsFollowed(t *testing.T) {
	before, after := newAPIServer(t, nil), newAPIServer(t, nil)
	path := filepath.Join(t.TempDir(), "value")
	put(t, path, before.kubeconfig(token("shim")))
	before.knows("Bearer shim")
	after.knows("Bearer shim")
	kube, step, logged := follow(t, path)
	_, err := kube.Discovery().ServerVersion()
	require.NoError(t, err)
	behind := after.kubeconfig(token("shim"))
	behind.Clusters["spoke"].Server += "/clusters/spoke/" // a proxy for several clusters
	put(t, path, behind)
	step()
	require.Eventually(t, func() bool { return len(logged()) == 1 }, patience, time.Millisecond)
	before.Close()
	_, err = kube.Discovery().ServerVersion()
	require.NoError(t, err)
	assert.Equal(t, map[string]int{"Bearer shim": 1}, after.seen)
	assert.Equal(t, []string{"/clusters/spoke/version"}, after.paths)
}

func TestAFileThatCannotBeUsedLeavesTheOneBeforeInForce(t *testing.T) {
	server := newAPIServer(t, nil)
	path := filepath.Join(t.TempDir(), "value")
	put(t, path, server.kubeconfig(token("shim")))
	server.knows("Bearer shim")
	kube, step, logged := follow(t, path)
	for i, spoil := range []func(){
		func() { require.NoError(t, os.WriteFile(path, []byte("{broken: secret-of-the-file"), 0o600)) },
		func() {
			put(t, path, server.kubeconfig(clientcmdapi.AuthInfo{TokenFile: "/var/run/secrets/kubernetes.io/serviceaccount/token"}))
		},
		func() { require.NoError(t, os.Remove(path)) },
	} {
		spoil()
		for range 2 { // it is logged once
			step()
		}
		require.Eventually(t, func() bool { return len(logged()) == i+1 }, patience, time.Millisecond)
		assert.NotContains(t, logged()[i], "secret-of-the-file")
		_, err := kube.Discovery().ServerVersion()
		require.NoError(t, err)
	}
	put(t, path, server.kubeconfig(token("next")))
	step()
	require.Eventually(t, func() bool { return len(logged()) == 4 }, patience, time.Millisecond)
	server.knows("Bearer next")
	_, err := kube.Discovery().ServerVersion()
	require.NoError(t, err)
}

func TestRequestsOfARotationFailNoCall(t *testing.T) {
	clients := newSigner(t)
	server := newAPIServer(t, clients.pool())
	var served atomic.Int64
	server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { // accepts every caller
		served.Add(1)
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"gitVersion":"v1.36.0"}`))
	})
	path := filepath.Join(t.TempDir(), "value")
	put(t, path, server.kubeconfig(clients.user(t, "caller")))
	kube, step, logged := follow(t, path)
	ctx, cancel := context.WithCancel(t.Context())
	var calling sync.WaitGroup
	for range 4 {
		calling.Go(func() {
			for ctx.Err() == nil {
				if _, err := kube.Discovery().ServerVersion(); !assert.NoError(t, err) {
					return
				}
			}
		})
	}
	for i := range 5 {
		put(t, path, server.kubeconfig(clients.user(t, fmt.Sprintf("caller-%d", i))))
		step()
		before := served.Load()
		require.Eventually(t, func() bool { return t.Failed() || len(logged()) == i+1 && served.Load() > before+20 }, patience, time.Millisecond)
	}
	cancel()
	calling.Wait()
}

func TestWhatReadsOrRunsSomethingElseIsRefused(t *testing.T) {
	server := newAPIServer(t, nil)
	for says, change := range map[string]func(*clientcmdapi.Config){
		`user "shim": exec is not accepted`: func(c *clientcmdapi.Config) { c.AuthInfos["shim"].Exec = &clientcmdapi.ExecConfig{Command: "true"} },
		`user "shim": auth-provider is not accepted`: func(c *clientcmdapi.Config) {
			c.AuthInfos["shim"].AuthProvider = &clientcmdapi.AuthProviderConfig{Name: "x"}
		},
		`user "shim": tokenFile is not accepted`:                 func(c *clientcmdapi.Config) { c.AuthInfos["shim"].TokenFile = "/token" },
		`user "shim": client-certificate and client-key are not`: func(c *clientcmdapi.Config) { c.AuthInfos["shim"].ClientKey = "/key" },
		`cluster "spoke": insecure-skip-tls-verify is not`:       func(c *clientcmdapi.Config) { c.Clusters["spoke"].InsecureSkipTLSVerify = true },
		`cluster "spoke": certificate-authority is not accepted`: func(c *clientcmdapi.Config) { c.Clusters["spoke"].CertificateAuthority = "/ca" },
		`no server found for cluster "spoke"`:                    func(c *clientcmdapi.Config) { c.Clusters["spoke"].Server = "" },
		`the server "https://:::" is not a URL`:                  func(c *clientcmdapi.Config) { c.Clusters["spoke"].Server = "https://:::" },
	} {
		t.Run(says, func(t *testing.T) {
			config := server.kubeconfig(token("shim"))
			change(&config)
			path := filepath.Join(t.TempDir(), "value")
			content, err := clientcmd.Write(config)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(path, content, 0o600))
			_, err = Open(path, clocktesting.NewFakeClock(time.Now()))
			require.ErrorContains(t, err, says)
			require.ErrorContains(t, err, path)
		})
	}
	_, err := Open(filepath.Join(t.TempDir(), "none"), clocktesting.NewFakeClock(time.Now()))
	require.ErrorIs(t, err, os.ErrNotExist)
}
