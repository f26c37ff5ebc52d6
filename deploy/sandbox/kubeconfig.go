package sandbox

import (
	"context"
	"fmt"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/karpenter-capi/karpenter-capi/deploy/sandbox/internal/pki"
)

// tokenLifetime exceeds the lifetime of a sandbox: nothing renews the token, as a kubelet would.
const tokenLifetime = 30 * 24 * 60 * 60 // seconds

// kubeconfig returns the content of a kubeconfig with one user.
func kubeconfig(name, server string, ca []byte, user clientcmdapi.AuthInfo) ([]byte, error) {
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca}
	config.AuthInfos[name] = &user
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	config.CurrentContext = name
	return clientcmd.Write(*config)
}

// writeKubeconfig writes a kubeconfig with one user of the given server.
func writeKubeconfig(file, name string, server Endpoint, user clientcmdapi.AuthInfo) error {
	data, err := kubeconfig(name, server.URL, server.CA, user)
	if err != nil {
		return err
	}
	return replaceFile(file, data)
}

func certificateUser(pair pki.Pair) clientcmdapi.AuthInfo {
	return clientcmdapi.AuthInfo{ClientCertificateData: pair.Certificate, ClientKeyData: pair.Key}
}

// serviceAccountUser requests a token of the ServiceAccount. If it is bound to an object, it is
// valid only while that exists.
func serviceAccountUser(
	ctx context.Context, admin *rest.Config, account client.ObjectKey, bound *authenticationv1.BoundObjectReference,
) (clientcmdapi.AuthInfo, error) {
	clients, err := kubernetes.NewForConfig(admin)
	if err != nil {
		return clientcmdapi.AuthInfo{}, err
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To[int64](tokenLifetime), BoundObjectRef: bound,
	}}
	token, err := clients.CoreV1().ServiceAccounts(account.Namespace).CreateToken(ctx, account.Name, request, metav1.CreateOptions{})
	if err != nil {
		return clientcmdapi.AuthInfo{}, fmt.Errorf("asking for a token of ServiceAccount %s: %w", account, err)
	}
	return clientcmdapi.AuthInfo{Token: token.Status.Token}, nil
}
